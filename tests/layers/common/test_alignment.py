"""Operands of different distributions and shapes, and the shapes and errors obtained from torch."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.layers.common.alignment import (
    broadcast_block,
    common_distribution,
    redistribute_with_grad_reduce,
)
from tests.distconv.layouts import counting, grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import same_as_one_process

SHAPE = (3, 2, 7, 4)


def test_operands_of_any_two_layouts_are_aligned(comm):
    shape = (5, 7, 3)
    a, b = normal(*shape), normal(*shape, seed=1)
    for one in twenty_layouts(comm, shape)[::3]:
        for other in twenty_layouts(comm, shape)[::4]:
            x, y = (dc.scatter(t.clone(), d).requires_grad_() for t, d in ((a, one), (b, other)))
            (x * y).sum().backward()
            assert torch.equal(dc.gather(x.grad), b), (one, other)
            assert torch.equal(dc.gather(y.grad), a), (one, other)


def test_shapes_that_do_not_broadcast_raise_torchs_error(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    match = r"size of tensor a \(4\) must match the size of tensor b \(5\)"
    with pytest.raises(RuntimeError, match=match):
        normal(*SHAPE) + normal(5)
    raises_everywhere(comm, dc.ShapeError, match, lambda: x + normal(5))


def test_a_dtype_without_a_kernel_raises_on_all_ranks(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    weight = normal(3, 2, 3, 3).float()
    with pytest.raises(RuntimeError) as caught:
        F.conv2d(normal(*SHAPE), weight)
    text = raises_everywhere(comm, dc.ShapeError, "type", lambda: F.conv2d(x, weight))
    assert str(caught.value) in text


REJECTED_BY_KERNELS = {
    "a convolution with negative padding": lambda x: F.conv2d(x, torch.ones(3, 2, 3, 3), padding=-1),
    "a transposed one with negative padding": lambda x: F.conv_transpose2d(x, torch.ones(2, 3, 3, 3), padding=-1),
    "pooling of one dimension without a step": lambda x: F.max_pool1d(x[0], 2, stride=0),
    "pooling without a step": lambda x: F.avg_pool2d(x, 2, stride=0),
    "maxima without a step": lambda x: F.max_pool2d(x, 2, stride=0),
    "slopes between bounds in the wrong order": lambda x: F.rrelu(x, 0.3, 0.1),
    "unshuffling of extents that do not divide": lambda x: F.pixel_unshuffle(x, 2),
    "the maximum of nothing": lambda x: x[:, :0].max(),
    "maxima over nothing": lambda x: x[:, :0].max(1),
    "the place of the maximum of nothing": lambda x: x[:, :, :0].argmax(),
    "interpolation of nothing": lambda x: F.interpolate(x[:, :, :0], size=(3, 3), mode="bilinear", align_corners=False),
    "a convolution of nothing": lambda x: F.conv2d(x[:, :, :0], torch.ones(3, 2, 3, 3), padding=2),
    "a transposed convolution of nothing": lambda x: F.conv_transpose2d(x[..., :0], torch.ones(2, 3, 3, 3)),
}


@pytest.mark.parametrize("name", REJECTED_BY_KERNELS)
def test_operands_that_torchs_kernels_reject_raise_their_error(comm, name):
    x = normal(*SHAPE).float()
    with pytest.raises((RuntimeError, IndexError)) as expected:
        REJECTED_BY_KERNELS[name](x)
    for grid in grids(comm, "nhw"):
        with pytest.raises((RuntimeError, IndexError), match=re.escape(str(expected.value).splitlines()[0])):
            REJECTED_BY_KERNELS[name](dc.scatter(x, grid))


def test_nearest_neighbours_of_no_samples_are_none(comm):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda x: F.interpolate(x, scale_factor=2), normal(0, 2, 3, 4))


def test_a_replicated_tensor_gets_the_sum_of_the_ranks_gradients(comm):
    for grid in grids(comm, "nhw"):
        dist = dc.Distribution(grid, ("n", "c", "h", "w"))
        whole = normal(2, 7, 1, seed=1).requires_grad_()
        block = broadcast_block(whole, dist, torch.Size(SHAPE))
        assert block.shape == (2, dist.local_shape(SHAPE)[2], 1)
        block.sum().backward()
        # Each rank gives each element of its part one.
        times = torch.full((7,), comm.size / grid.shape["h"], dtype=torch.float64)
        assert torch.equal(whole.grad, times.view(1, 7, 1).expand(2, 7, 1)), grid


def test_a_dimension_that_broadcasts_takes_no_split_from_the_operand_that_has_it_once(comm):
    for grid in grids(comm, "nc"):
        axes = ("n", "c")
        once = dc.scatter(normal(1, 4), dc.Distribution(grid, axes))
        found = common_distribution([once, torch.zeros(6, 4)], torch.Size((6, 4)))
        assert found.axes == (None, "c")
        same_as_one_process(grid, lambda a, b: a * b, normal(1, 4), normal(6, 4, seed=1))


def test_what_was_split_gets_the_sums_of_all_that_it_enters(comm):
    grid, n = grid_over(comm, n=comm.size), comm.size
    x = dc.scatter(counting(n), grid).requires_grad_()
    # Whole in work that is split over the same axis: each rank uses all of it, rank + 1 times.
    block = redistribute_with_grad_reduce(x, dc.Distribution(grid, (None,)), ["n"])
    assert torch.equal(block.detach(), counting(n))
    (block * (comm.rank + 1)).sum().backward()
    assert torch.equal(dc.gather(x.grad), torch.full((n,), n * (n + 1) / 2).double())
