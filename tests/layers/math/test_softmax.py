"""Softmax and logsumexp along dimensions, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

SOFTMAX_FUNCTIONS = {
    "logsumexp over several": lambda x: torch.logsumexp(x * 300, (1, 2), True),
    "softmax over rows": lambda x: F.softmax(x * 300, 2) * x,
    "softmax in another dtype": lambda x: torch.softmax(x.float(), 1, torch.float64),
}


@pytest.mark.parametrize("name", SOFTMAX_FUNCTIONS)
@UP_TO_FOUR_RANKS
def test_soft_maxima_equal_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, SOFTMAX_FUNCTIONS[name], normal(*SHAPE))


def test_a_soft_maximum_gathers_nothing(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, c=comm.size))
    assert x.softmax(1).dist == x.dist


@pytest.mark.ranks(at_least=2)
def test_a_soft_maximum_without_a_dimension_names_a_fix(comm):
    x = dc.scatter(normal(6, 6), grid_over(comm, c=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "pass dim", lambda: F.softmax(x))
