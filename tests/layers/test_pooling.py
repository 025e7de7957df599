"""Pooling with windows across block borders, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.core.layouts import grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process

WINDOWS = [
    (2, 2, 0),
    (3, 1, 1),
    (3, 2, 1),
    (3, 3, 0),
    (2, 3, 1),
    (5, 2, 2),
    ((3, 2), (1, 3), (1, 0)),
    (4, 4, 2),
]


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@UP_TO_SIX_RANKS
def test_max_pooling_equals_one_process(comm, kernel, stride, padding, ceil_mode):
    pool = partial(F.max_pool2d, kernel_size=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode)
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, pool, normal(2, 2, 7, 9))
        same_as_one_process(grid, pool, normal(2, 2, 8, 5).round())


@pytest.mark.parametrize("dilation", [2, (1, 3)])
def test_dilated_max_pooling_equals_one_process(comm, dilation):
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, lambda x: F.max_pool2d(x, 3, 2, 1, dilation), normal(2, 2, 8, 9))


def test_ties_across_a_border_go_to_the_same_element_as_in_one_process(comm):
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, lambda x: F.max_pool2d(x, 3, 1, 1), torch.zeros(1, 1, 7, 8).double())


def test_padding_never_wins_over_negative_values(comm):
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, lambda x: F.max_pool2d(x, 3, 2, 1), normal(1, 2, 7, 8).abs().neg() - 5)


def test_a_nan_spreads_to_the_windows_that_hold_it(comm):
    x = normal(1, 1, 7, 8)
    x[0, 0, 3, 4] = torch.nan
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, lambda x: F.max_pool2d(x, 3, 1, 1), x)


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


@pytest.mark.parametrize("pool", [F.max_pool1d, F.avg_pool1d])
def test_in_one_dimension(comm, pool):
    for grid in grids(comm, "nw"):
        same_as_one_process(grid, lambda x: pool(x, 3, 2, 1, ceil_mode=True), normal(3, 2, 9))


@pytest.mark.parametrize("pool", [F.max_pool3d, F.avg_pool3d])
def test_in_three_dimensions(comm, pool):
    for grid in grids(comm, "dhw"):
        same_as_one_process(grid, lambda x: pool(x, 3, 2, 1, ceil_mode=True), normal(1, 2, 5, 7, 4))


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
@pytest.mark.parametrize("size", [(2, 2), (9, 2), (3, 3)])
def test_ranks_without_outputs_take_part(comm, pool, size):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda x: pool(x, 2, 2), normal(1, 2, *size))


@pytest.mark.parametrize("size", [1, (1, 3), 4, (7, 2), (None, 3)])
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
@UP_TO_SIX_RANKS
def test_adaptive_pooling_equals_one_process(comm, pool, size):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda x: pool(x, size), normal(3, 2, 7, 9))


def test_what_global_pooling_shrinks_is_replicated_from_then_on(comm):
    for grid in grids(comm, "hw"):
        y = same_as_one_process(grid, lambda x: F.adaptive_avg_pool2d(x, 1), normal(3, 2, 7, 9))
        assert not y.dist.split_axes


@pytest.mark.parametrize("pool", [lambda x: F.max_pool1d(x, 3, 2, 1), lambda x: F.avg_pool1d(x, 3, 1, 1)])
def test_any_layout_of_the_input_will_do(comm, pool):
    for dist in twenty_layouts(comm, (5, 7, 6)):
        if dist.split[1] is None:
            same_as_one_process(dist, pool, normal(5, 7, 6))


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
def test_what_torch_refuses_is_refused_in_its_words(comm, call, match):
    with pytest.raises(RuntimeError, match=match):
        call(normal(1, 2, 7, 8))
    x = dc.scatter(normal(1, 2, 7, 8), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.ShapeError, match, lambda: call(x))


@pytest.mark.parametrize("pool", [F.max_pool2d, F.adaptive_max_pool2d])
def test_indices_are_not_offered(comm, pool):
    x = dc.scatter(normal(1, 2, 7, 8), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "indices", lambda: pool(x, 2, return_indices=True))


def test_an_input_without_samples_is_refused(comm):
    x = dc.scatter(normal(2, 7, 8), grid_over(comm, h=comm.size), dims="-hw")
    raises_everywhere(comm, dc.UnsupportedOperation, r"unsqueeze\(0\)", lambda: F.max_pool2d(x, 2))
