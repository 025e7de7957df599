"""Sorting, ranking and running sums, against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

SORTING_FUNCTIONS = {
    "sort": lambda x: x.sort(2)[0],
    "places of sort": lambda x: x.sort(1, descending=True).indices,
    "stable sort": lambda x: torch.sort(x.round(), dim=2, stable=True).indices,
    "argsort": lambda x: x.argsort(dim=2),
    "msort": lambda x: x.msort(),
    "topk": lambda x: x.topk(2, 1)[0],
    "places of topk": lambda x: torch.topk(x, 3, dim=2, largest=False).indices,
    "kthvalue": lambda x: x.kthvalue(3, 2)[0],
    "median": lambda x: x.median(),
    "median along channels": lambda x: x.median(1)[0],
    "mode": lambda x: x.round().mode(1)[0],
    "cumsum": lambda x: x.cumsum(2),
    "cumprod": lambda x: torch.cumprod(x, 1),
    "cummax": lambda x: x.cummax(2)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(dim=2),
}


def test_an_output_given_by_the_caller_raises(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    out = (torch.empty(SHAPE), torch.empty(SHAPE, dtype=torch.int64))
    raises_everywhere(comm, dc.UnsupportedOperation, "out=", lambda: torch.sort(x, 1, out=out))


@pytest.mark.parametrize("name", SORTING_FUNCTIONS)
@UP_TO_FOUR_RANKS
def test_ordering_equals_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, SORTING_FUNCTIONS[name], normal(*SHAPE))
