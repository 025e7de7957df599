"""Convolution over samples and space against one process, for all options of its geometry."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, built, check_module_same_as_one_process


@pytest.mark.fault(8)
@pytest.mark.parametrize("size", [(7, 9), (3, 13)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        (4, 2, 1, 1),
        (1, 3, 1, 1),
        (2, 4, 1, 1),
        (3, 2, 3, 3),
        ((3, 5), (1, 2), (0, 4), (1, 1)),
        ((1, 3), (3, 1), (2, 0), (1, 2)),
        (3, 1, 4, 1),
    ],
)
@UP_TO_SIX_RANKS
def test_in_two_dimensions_it_equals_one_process(comm, kernel, stride, padding, dilation, size):
    module = built(lambda: nn.Conv2d(2, 3, kernel, stride, padding, dilation))
    for grid in grids(comm, "hw"):
        check_module_same_as_one_process(grid, module, normal(2, 2, *size))


@pytest.mark.fault(5, 7, 11)
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (7, 1, 1), (4, 3, 2)])
@pytest.mark.parametrize("size", [9, 13])
def test_in_one_dimension_it_equals_one_process(comm, kernel, stride, dilation, size):
    module = built(lambda: nn.Conv1d(2, 3, kernel, stride, 3, dilation))
    for grid in grids(comm, "nw"):
        check_module_same_as_one_process(grid, module, normal(3, 2, size))


@pytest.mark.ranks(8)
def test_samples_and_all_of_space_may_be_split_at_once(comm):
    module = built(lambda: nn.Conv3d(2, 2, 3, padding=1))
    check_module_same_as_one_process(grid_over(comm, d=2, h=2, w=2), module, normal(1, 2, 5, 4, 7))
    module = built(lambda: nn.Conv2d(2, 2, 3, padding=1))
    check_module_same_as_one_process(grid_over(comm, n=2, h=2, w=2), module, normal(3, 2, 5, 7))


@pytest.mark.fault(4, 5)
@pytest.mark.parametrize("size", [(8, 1), (1, 8), (4, 3)])
def test_a_halo_wider_than_the_blocks_comes_from_several_ranks(comm, size):
    module = built(lambda: nn.Conv2d(1, 2, 7, padding=3))
    for grid in grids(comm, "hw"):
        check_module_same_as_one_process(grid, module, normal(1, 1, *size))


@pytest.mark.fault(9, 10)
@pytest.mark.parametrize("size", [(3, 3), (1, 2), (1, 1)])
def test_ranks_without_rows_take_part_and_get_empty_gradients(comm, size):
    module = built(lambda: nn.Conv2d(2, 2, 3, padding=1))
    for grid in grids(comm, "nhw"):
        x = dc.scatter(normal(1, 2, *size), grid).requires_grad_()
        module(x).sum().backward()
        assert x.grad.local.shape == x.local.shape
        module.zero_grad()
        check_module_same_as_one_process(grid, module, normal(1, 2, *size))


def test_the_operator_and_its_gradient_are_adjoint(comm):
    """<F x, y> = <x, F* y>: convolution without bias is linear in x."""
    w = normal(3, 2, 3, 3, seed=1)
    for grid in grids(comm, "nhw"):
        x = dc.scatter(normal(3, 2, 7, 9), grid).requires_grad_()
        y = F.conv2d(x, w, stride=2, padding=2, dilation=2)
        other = normal(*y.shape, seed=2)
        forward = (y * other).sum().item()
        y.backward(other)
        assert forward == pytest.approx((x.detach() * x.grad).sum().item(), rel=1e-12)


@pytest.mark.fault(19)
def test_memory_layouts_of_input_and_weight_change_nothing(comm):
    x, w = normal(2, 4, 7, 8), normal(3, 4, 3, 3, seed=1)
    for grid in grids(comm, "hw"):
        expected = dc.gather(F.conv2d(dc.scatter(x, grid), w, padding=1))
        for form in (
            lambda t: t.to(memory_format=torch.channels_last),
            lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
            lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
        ):
            for y in (
                F.conv2d(dc.scatter(form(x), grid), w, padding=1),
                F.conv2d(dc.scatter(x, grid), form(w), padding=1),
            ):
                torch.testing.assert_close(dc.gather(y), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.fault(6)
@pytest.mark.parametrize("kernel", [9, (3, 12)])
def test_a_kernel_larger_than_the_padded_input_raises_torchs_error(comm, kernel):
    module, x = built(lambda: nn.Conv2d(2, 2, kernel)), normal(1, 2, 7, 8)
    with pytest.raises(RuntimeError) as caught:
        module(x)
    text = raises_everywhere(
        comm, dc.ShapeError, "Kernel size can't be greater", lambda: module(dc.scatter(x, grid_over(comm, h=comm.size)))
    )
    assert str(caught.value) in text


def test_wrong_channels_raise_torchs_error(comm):
    x = normal(1, 3, 7, 8)
    w = normal(2, 2, 3, 3)
    with pytest.raises(RuntimeError) as caught:
        F.conv2d(x, w)
    text = raises_everywhere(
        comm, dc.ShapeError, "channels", lambda: F.conv2d(dc.scatter(x, grid_over(comm, h=comm.size)), w)
    )
    assert str(caught.value) in text


def test_a_plain_input_with_a_distributed_weight_raises(comm):
    w = dc.scatter(normal(2, 2, 3, 3), grid_over(comm, n=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "scatter the input first", lambda: F.conv2d(normal(1, 2, 7, 8), w))


@pytest.mark.ranks(2, 4)
def test_little_work_is_convolved_at_once(comm):
    module = built(lambda: nn.Conv2d(2, 3, 3, padding=1))
    x = dc.scatter(normal(2, 2, 8, 9), grid_over(comm, h=comm.size)).requires_grad_()
    module(x).sum().backward()
    with torch.profiler.profile() as seen:
        module(x).sum().backward()
    names = [event.name for event in seen.events()]
    assert (names.count("aten::conv2d"), names.count("aten::convolution_backward")) == (1, 1)
