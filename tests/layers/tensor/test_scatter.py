"""Scatter and scatter_add against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process

SHAPE = (3, 4, 7, 5)


def indices(*shape, below=4):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, i, d: x.scatter(d, i, 2.0),
        lambda x, i, d: torch.scatter(x, d, i, value=2.0),
        lambda x, i, d: torch.scatter_add(x, d, i, x * x),
        lambda x, i, d: (x * 1).scatter_(d, i, 2.0),
        lambda x, i, d: (x * 1).scatter_add_(d, i, src=x * x),
    ],
)
def test_it_equals_one_process(comm, call, dim):
    for grid in grids(comm, "ch"):
        same_as_one_process(grid, lambda x, i: call(x, i, dim), normal(*SHAPE), indices(*SHAPE))


def test_operands_of_other_extents_are_gathered(comm):
    for grid in grids(comm, "ch"):
        same_as_one_process(grid, lambda x, i: x.scatter(1, i, 2.0), normal(*SHAPE), indices(2, 1, 6, 5))
        same_as_one_process(grid, lambda x, i, s: x.scatter_add(1, i, s), normal(*SHAPE), indices(3, 2, 7, 5),
                            normal(3, 2, 7, 5))  # fmt: skip


def test_a_plain_tensor_of_zeros_may_become_one_hot_labels(comm):
    for grid in grids(comm, "ch"):

        def one_hot(x, labels):
            found = torch.zeros(x.shape, dtype=x.dtype).scatter_(1, labels, 1)
            return x * found

        same_as_one_process(grid, one_hot, normal(*SHAPE), indices(3, 1, 7, 5), dims=["nchw", "n-hw"])
        same_as_one_process(grid, lambda i: torch.zeros(SHAPE).scatter(1, i, 1.0), indices(3, 1, 7, 5), dims=["n-hw"])


@pytest.mark.parametrize("bad", [9, -1])
@pytest.mark.cpu
def test_an_index_that_one_rank_alone_has_wrong_is_refused_on_all(comm, bad):
    wrong = indices(*SHAPE)
    wrong[2, 3, 6, 4] = bad
    grid = grid_over(comm, h=comm.size)
    x, i = dc.scatter(normal(*SHAPE), grid), dc.scatter(wrong, grid)
    raises_everywhere(comm, IndexError, f"index {bad} is out of bounds", lambda: x.scatter(1, i, 1.0))


def test_writing_into_a_plain_tensor_under_autograd_is_refused(comm):
    i = dc.scatter(indices(*SHAPE), grid_over(comm, h=comm.size))
    x = normal(*SHAPE).requires_grad_() * 1
    raises_everywhere(comm, dc.UnsupportedOperation, "into a plain tensor", lambda: x.scatter_(1, i, 1.0))
