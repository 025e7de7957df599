"""Pooling with windows across block borders, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process, values_plus_indices

WINDOWS = [
    (3, 2, 1),
    (2, 3, 1),
    (5, 2, 2),
    ((3, 2), (1, 3), (1, 0)),
    (4, 4, 2),
]


@pytest.mark.fault(14)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@UP_TO_SIX_RANKS
def test_max_pooling_equals_one_process(comm, kernel, stride, padding, ceil_mode):
    pool = partial(F.max_pool2d, kernel_size=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode)
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, pool, normal(2, 2, 7, 9))
        same_as_one_process(grid, pool, normal(2, 2, 8, 5).round())


@pytest.mark.fault(14)
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@UP_TO_SIX_RANKS
def test_average_pooling_equals_one_process(comm, kernel, stride, padding, ceil_mode, include):
    pool = partial(
        F.avg_pool2d, kernel_size=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode, count_include_pad=include
    )
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, pool, normal(2, 2, 7, 9))


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_a_divisor_may_be_given(comm, ceil_mode):
    pool = partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1, ceil_mode=ceil_mode, divisor_override=5)
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, pool, normal(2, 2, 8, 9))


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
@pytest.mark.parametrize("size", [(2, 2), (9, 2), (3, 3)])
def test_ranks_without_outputs_take_part(comm, pool, size):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda x: pool(x, 2, 2), normal(1, 2, *size))


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_padding_of_a_maximum_copies_no_input(comm):
    """Eight rows need no padding on the last rank; nine rows do, so that it pads its block."""
    for rows, copies in ((8, 0), (9, comm.rank)):
        x = dc.scatter(normal(1, 2, rows, 7), grid_over(comm, h=2))
        with torch.profiler.profile() as profile:
            F.max_pool2d(x, 3, 2, 1)
        assert [event.name for event in profile.events()].count("aten::constant_pad_nd") == copies


# -- indices ----------------------------------------------------------------------------------------------------------


def test_an_index_of_minus_infinity_is_that_of_one_process(comm):
    for dilation in (1, 2):
        for grid in grids(comm, "hw"):
            same_as_one_process(
                grid,
                lambda x, d=dilation: F.max_pool2d(x, 3, 2, 1, d, return_indices=True)[1],
                torch.full((1, 1, 7, 8), -torch.inf).double(),
            )


def test_unpooling_with_any_indices(comm):
    at = torch.tensor([[[5, 0, 11], [3, 4, 7]]])
    for grid in grids(comm, "cw"):
        same_as_one_process(grid, lambda x, at: F.max_unpool1d(x, at, 4), normal(1, 2, 3), at)
        same_as_one_process(grid, lambda x: F.max_unpool1d(x, at, 4), normal(1, 2, 3))


@pytest.mark.cpu
def test_an_index_outside_the_output_raises_on_all_ranks(comm):
    x = dc.scatter(normal(1, 2, 3), grid_over(comm, n=comm.size))
    at = dc.scatter(torch.tensor([[[0, 1, 2], [3, 4, 12]]]), grid_over(comm, n=comm.size))
    raises_everywhere(comm, dc.ShapeError, "invalid max index: 12", lambda: F.max_unpool1d(x, at, 4))


# -- more -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
        lambda x: F.adaptive_max_pool2d(x, 1),
        lambda x: values_plus_indices(F.max_pool2d(x, 2, return_indices=True)),
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(7, 9)),
    ],
)
def test_a_sample_without_a_sample_dimension(comm, pool):
    for grid in grids(comm, "chw"):
        same_as_one_process(grid, pool, normal(2, 7, 9), dims=["chw"])
        same_as_one_process(grid, pool, normal(2, 7, 9), dims=["-hw"])


@pytest.mark.cpu
def test_integers_are_pooled(comm):
    for grid in grids(comm, "hw"):
        for pool in (F.max_pool2d, F.avg_pool2d, partial(F.avg_pool2d, count_include_pad=False)):
            same_as_one_process(grid, lambda x, pool=pool: pool(x, 3, 2, 1), (10 * normal(1, 2, 7, 8)).long())


def test_average_pooling_and_its_gradient_are_adjoint(comm):
    for grid in grids(comm, "nhw"):
        x = dc.scatter(normal(3, 2, 7, 9), grid).requires_grad_()
        y = F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
        other = normal(*y.shape, seed=1)
        forward = (y * other).sum().item()
        y.backward(other)
        assert forward == pytest.approx((x.detach() * x.grad).sum().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: F.max_pool2d(x, 3, padding=2), "pad should be at most half of effective kernel size"),
        (lambda x: F.avg_pool2d(x, 3, padding=2), "pad should be at most half of"),
        (lambda x: F.max_pool2d(x, 9), "Output size is too small"),
        (lambda x: F.avg_pool2d(x, 3, divisor_override=0), "divisor must be not zero"),
    ],
)
def test_arguments_that_torch_rejects_raise_its_error(comm, call, match):
    with pytest.raises(RuntimeError, match=match):
        call(normal(1, 2, 7, 8))
    x = dc.scatter(normal(1, 2, 7, 8), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.ShapeError, match, lambda: call(x))


@pytest.mark.parametrize("pool", [F.fractional_max_pool2d, F.fractional_max_pool3d])
@pytest.mark.ranks(at_least=2)
def test_fractional_pooling_raises(comm, pool):
    x = dc.scatter(normal(1, 2, 7, 8, 4) if pool is F.fractional_max_pool3d else normal(1, 2, 7, 8),
                   grid_over(comm, h=comm.size))  # fmt: skip
    raises_everywhere(comm, dc.UnsupportedOperation, "scatter the result", lambda: pool(x, 2, output_size=3))
