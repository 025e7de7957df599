"""Arguments that are not what they were are described."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.capture.watch.arguments import Arguments
from tests.distconv.layouts import grid_over


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, 4),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(9)[3:].view(2, 3),
        nn.Parameter(torch.ones(2, 3)),
    ],
)
def test_another_tensor_is_described(other):
    known = Arguments([torch.ones(2, 3), 5])
    assert known.difference([torch.zeros(2, 3), 5], [torch.zeros(2, 3), 5]) == ""
    assert known.difference([other, 5], [other, 5]).startswith("argument 0 is ")
    assert known.difference([torch.ones(2, 3), 6], [torch.ones(2, 3), 6]) == "argument 1 is 6, it was 5"
    assert known.difference([torch.ones(2, 3)], [torch.ones(2, 3)]) == "other arguments"


def test_arguments_that_are_one_tensor():
    x, y = torch.ones(2), torch.ones(2)
    assert Arguments([x, y]).difference([x, x], [x, x]) == "other arguments are one tensor"
    assert Arguments([x, x]).difference([y, y], [y, y]) == ""


def test_another_distribution_is_described(comm):
    x = torch.ones(4, 4, 4, 4)
    rows, samples = dc.scatter(x, grid_over(comm, h=comm.size)), dc.scatter(x, grid_over(comm, n=comm.size))
    assert Arguments([rows]).difference([rows], [rows]) == ""
    assert bool(Arguments([rows]).difference([samples], [samples])) == (comm.size > 1)
