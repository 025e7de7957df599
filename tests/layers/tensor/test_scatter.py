"""Scatter and scatter_add against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process

SHAPE = (3, 4, 7, 5)


def indices(*shape, below=4):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include", [True, False])
def test_reductions_in_place_keep_what_their_gradients_need(comm, reduce, include):
    """Backward passes read the values of before, which are written over."""
    for grid in grids(comm, "nch"):
        same_as_one_process(
            grid,
            lambda x, i: (x * 1).scatter_reduce_(3, i, x * x + 1, reduce, include_self=include),
            normal(*SHAPE),
            indices(*SHAPE),
        )


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
def test_an_index_that_is_invalid_on_one_rank_raises_on_all_ranks(comm, bad):
    wrong = indices(*SHAPE)
    wrong[2, 3, 6, 4] = bad
    grid = grid_over(comm, h=comm.size)
    x, i = dc.scatter(normal(*SHAPE), grid), dc.scatter(wrong, grid)
    raises_everywhere(comm, IndexError, f"index {bad} is out of bounds", lambda: x.scatter(1, i, 1.0))


def test_writing_into_a_plain_tensor_under_autograd_raises(comm):
    i = dc.scatter(indices(*SHAPE), grid_over(comm, h=comm.size))
    x = normal(*SHAPE).requires_grad_() * 1
    raises_everywhere(comm, dc.UnsupportedOperation, "into a plain tensor", lambda: x.scatter_(1, i, 1.0))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_goes_to_one_place_is_added_up(comm: Any, in_place: bool) -> None:
    places = (normal(315, seed=40) * 2).long().abs() % 5
    for grid in grids(comm, "nch"):
        x = normal(5, 3, 7, 9).requires_grad_()
        d = dc.scatter(x.detach(), grid).requires_grad_()
        sums = []
        for given, index in ((x, places), (d, dc.scatter(places, grid, "n"))):
            features = given.permute(0, 2, 3, 1).reshape(-1, 3)
            start = torch.ones(5, 3, dtype=torch.float64)
            add = start.index_add_ if in_place else start.index_add
            sums.append(add(0, index, features, alpha=2))
            (sums[-1] ** 2).sum().backward()
        torch.testing.assert_close(dc.gather(sums[1]) if isinstance(sums[1], dc.DistTensor) else sums[1], sums[0])
        assert d.grad is not None
        torch.testing.assert_close(dc.gather(d.grad), x.grad)


@pytest.mark.ranks(2, 3)
def test_a_confusion_matrix_is_counted_where_the_pixels_are(comm: Any) -> None:
    labels = [(normal(5, 7, 9, seed=seed) * 2).long().abs() % 5 for seed in (40, 41)]
    labels[1] = labels[1] - 5  # counted from the end
    one = torch.ones((), dtype=torch.float64)
    for grid in grids(comm, "nhw"):
        found, expected = (torch.zeros(5, 5, dtype=torch.float64) for _ in range(2))
        found.index_put_(tuple(dc.scatter(t, grid, "nhw") for t in labels), one, accumulate=True)
        expected.index_put_(tuple(labels), one, accumulate=True)
        torch.testing.assert_close(found, expected)


@pytest.mark.ranks(2)
def test_a_position_out_of_bounds_raises_on_all_ranks(comm: Any) -> None:
    grid = grids(comm, "n")[0]
    places = torch.tensor([0, 1, 2, 3, 9])
    index, source = dc.scatter(places, grid, "n"), dc.scatter(normal(5, 3), grid)
    target = torch.zeros(5, 3, dtype=torch.float64)
    raises_everywhere(comm, dc.NumericalError, "index 9 is out of bounds", lambda: target.index_add(0, index, source))
