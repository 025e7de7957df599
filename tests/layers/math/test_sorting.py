"""Sorting, ranking and running sums, against one process."""

from __future__ import annotations

import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere

SHAPE = (3, 4, 7, 5)


def test_an_output_given_by_the_caller_raises(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    out = (torch.empty(SHAPE), torch.empty(SHAPE, dtype=torch.int64))
    raises_everywhere(comm, dc.UnsupportedOperation, "out=", lambda: torch.sort(x, 1, out=out))
