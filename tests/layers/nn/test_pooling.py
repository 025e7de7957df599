"""Pooling with windows across block borders, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process, values_plus_indices

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


@pytest.mark.fault(14)
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


# -- indices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pool",
    [
        partial(F.max_pool2d, kernel_size=2),
        partial(F.max_pool2d, kernel_size=3, stride=2, padding=1, ceil_mode=True),
        partial(F.max_pool2d, kernel_size=(3, 2), stride=1, padding=1, dilation=(2, 1)),
        partial(F.max_pool2d_with_indices, kernel_size=2),
    ],
)
@UP_TO_SIX_RANKS
def test_indices_count_in_the_global_space(comm, pool):
    options = {"return_indices": True} if pool.func is F.max_pool2d else {}
    for grid in grids(comm, "ch"):
        same_as_one_process(grid, lambda x: values_plus_indices(pool(x, **options)), normal(3, 2, 7, 9))
        same_as_one_process(grid, lambda x: values_plus_indices(pool(x, **options)), normal(1, 2, 8, 5).round())


@pytest.mark.parametrize(("count", "shape"), [(1, (3, 2, 9)), (3, (2, 2, 3, 7, 4))])
def test_indices_in_one_and_three_dimensions(comm, count, shape):
    pool = partial(getattr(F, f"max_pool{count}d"), return_indices=True)
    for grid in grids(comm, {1: "nw", 3: "dw"}[count]):
        same_as_one_process(grid, lambda x: values_plus_indices(pool(x, 2)), normal(*shape))


def test_an_index_of_minus_infinity_is_that_of_one_process(comm):
    for dilation in (1, 2):
        for grid in grids(comm, "hw"):
            same_as_one_process(
                grid,
                lambda x, d=dilation: F.max_pool2d(x, 3, 2, 1, d, return_indices=True)[1],
                torch.full((1, 1, 7, 8), -torch.inf).double(),
            )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_unpooling_puts_values_back(comm, count):
    pool, unpool = getattr(F, f"max_pool{count}d"), getattr(F, f"max_unpool{count}d")
    for grid in grids(comm, ["nw", "nchw", "dw"][count - 1]):

        def run(x):
            y, at = pool(x, 2, return_indices=True)
            return unpool(y * y, at, 2, output_size=x.shape)

        same_as_one_process(grid, run, normal(2, 2, *(4, 7, 9)[-count:]))


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


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_power_average_pooling_equals_one_process(comm, ceil_mode):
    for grid in grids(comm, "chw"):
        for p in (1, 2, 3.0):
            pool = partial(F.lp_pool2d, norm_type=p, kernel_size=3, stride=2, ceil_mode=ceil_mode)
            same_as_one_process(grid, pool, normal(2, 2, 7, 8).abs())
    for grid in grids(comm, "w"):
        same_as_one_process(grid, lambda x: F.lp_pool1d(x, 2, 3), normal(2, 2, 9))
        same_as_one_process(grid, lambda x: F.lp_pool3d(x, 2, 2), normal(1, 2, 2, 4, 9))


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
        same_as_one_process(grid, lambda x: F.max_pool2d(x, 3, 2, 1), (10 * normal(1, 2, 7, 8)).long())


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
