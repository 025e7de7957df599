"""The input that each rank needs for its outputs: its values against the padded full tensor, and its adjoint."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.kernels.convolution import Geometry
from distconv.layers.common.input_windows import gather_needed_input, spatial_box, window_needs
from tests.distconv.layouts import counting, grids, normal

GEOMETRIES = [
    Geometry((3, 3), (1, 1), (1, 1), (1, 1)),
    Geometry((5, 2), (2, 3), (3, 0), (1, 2)),
    Geometry((1, 1), (2, 2), (0, 0), (1, 1)),
    Geometry((1, 1), (1, 1), (-2, 4), (1, 1)),
]
PADDED = 20
"""More than any of these windows reaches out of the input."""


def outputs(geometry, shape):
    space = [
        (n + 2 * geometry.padding[d] - geometry.reach(d)) // geometry.stride[d] + 1 for d, n in enumerate(shape[2:])
    ]
    return torch.Size([*shape[:2], *space])


def brute_force_block(whole, dist, out_shape, geometry, fill):
    """Return the block by brute force: crop its windows from the full input with ample padding."""
    block = whole[tuple(slice(i.start, i.stop) for i in dist.box(None, whole.shape)[:2])]
    block = F.pad(block, (PADDED,) * 4, value=fill)
    for dim, out in enumerate(spatial_box(dist, out_shape)):
        touched = [
            o * geometry.stride[dim] - geometry.padding[dim] + k * geometry.dilation[dim]
            for o in range(*out)
            for k in range(geometry.kernel[dim])
        ]
        start, stop = (min(touched), max(touched) + 1) if touched else (0, 0)
        block = block.narrow(dim + 2, start + PADDED, stop - start)
    return block


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("space", [(9, 8), (3, 5)])
def test_a_rank_gets_the_windows_of_its_outputs(comm, geometry, space):
    whole = counting(2, 3, *space)
    out_shape = outputs(geometry, whole.shape)
    for grid in grids(comm, "nchw"):
        x = dc.scatter(whole, grid)
        found = gather_needed_input(x, out_shape, geometry, fill=-7.0)
        assert torch.equal(found, brute_force_block(whole, x.dist, out_shape, geometry, -7.0)), grid


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_what_is_needed_by_several_gets_the_sum_of_their_gradients(comm, geometry):
    whole = normal(2, 3, 9, 8)
    out_shape = outputs(geometry, whole.shape)
    for grid in grids(comm, "nhw"):
        x = dc.scatter(whole, grid).requires_grad_()
        block = gather_needed_input(x, out_shape, geometry)
        other = normal(*block.shape, seed=1 + comm.rank)
        block.backward(other)
        left, right = float((block.detach() * other).sum()), float((x.local.detach() * x.local.grad).sum())
        assert comm.allreduce(left) == pytest.approx(comm.allreduce(right), rel=1e-12), grid


def test_windows_of_what_is_not_split_need_nothing_from_others(comm):
    for grid in grids(comm, "nc"):
        dist = dc.Distribution(grid, ("n", "c", "h", "w"))
        assert window_needs(dist, (2, 3, 9, 8), (2, 3, 9, 8), GEOMETRIES[0]).needed == ()


@pytest.mark.parametrize(("extent", "needs"), [(8, False), (9, True)])
def test_windows_that_do_not_cross_blocks_need_nothing_from_others(comm, extent, needs):
    pool = Geometry((2, 2), (2, 2), (0, 0), (1, 1))
    for grid in grids(comm, "h"):
        size = extent * comm.size
        dist = dc.Distribution(grid, ("n", "c", "h", "w"))
        found = window_needs(dist, (1, 1, size, 4), (1, 1, size // 2, 2), pool).needed
        assert bool(found) == (needs and comm.size > 1)
