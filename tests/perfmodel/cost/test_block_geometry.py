"""Geometry of blocks against the distributions and windows that distconv really uses, on every rank."""

from __future__ import annotations

import itertools
import math

import pytest

import distconv as dc
from distconv.distribution import Distribution, block_range, default_axes
from distconv.kernels.convolution import Geometry
from distconv.layers.common.input_windows import window_needs
from distconv.perfmodel.cost import block_geometry
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.graph.graph import KernelWindow

SHAPES = [(4, 3, 9, 7), (7, 8, 5, 6), (2, 6, 16, 16), (5, 12), (3, 4, 6, 7, 8)]


def _grids(size, axes):
    found = [
        dict(zip(axes, parts, strict=True))
        for parts in itertools.product(range(1, size + 1), repeat=len(axes))
        if size % math.prod(parts) == 0
    ]
    return found[:: max(1, len(found) // 9)]


def _missing(shape, source, target, rank):
    own, new = source.box(rank, shape), target.box(rank, shape)
    common = math.prod(a.intersect(b).extent for a, b in zip(own, new, strict=True))
    return math.prod(i.extent for i in new) - common


@pytest.mark.long
@pytest.mark.ranks(1, 2, 3, 4, 6)
def test_a_redistribution_moves_what_the_busiest_rank_lacks(comm):
    for shape in SHAPES:
        axes = [axis for axis in default_axes(None, len(shape)) if axis]
        grids = _grids(comm.size, axes)
        real = [dc.ProcessGrid(comm, r=comm.size // math.prod(g.values()), **g) for g in grids]
        for (a, grid_a), (b, grid_b) in itertools.product(zip(grids, real, strict=True), repeat=2):
            source = Distribution(grid_a, default_axes(None, len(shape)))
            target = Distribution(grid_b, default_axes(None, len(shape)))
            most = max(_missing(shape, source, target, rank) for rank in range(comm.size))
            moved = block_geometry.redistribution(
                shape, AxisParts.from_axes(a, comm.size, comm.size), AxisParts.from_axes(b, comm.size, comm.size)
            )
            assert moved.near == most and moved.far == 0, (shape, a, b)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_halos_are_what_ranks_need_beyond_what_they_own(comm, kernel, stride):
    for extent, padding, dilation in itertools.product([8, 13, 17], [0, kernel // 2], [1, 2]):
        out = (extent + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        if out < comm.size:
            continue
        window = KernelWindow((kernel,), (stride,), (padding,), (dilation,))
        grid = dc.ProcessGrid(comm, w=comm.size)
        dist = Distribution(grid, ("n", "c", "w"))
        geometry = Geometry((kernel,), (stride,), (padding,), (dilation,))
        boxes = window_needs(dist, (1, 1, extent), (1, 1, out), geometry)
        needed = []
        for rank in range(comm.size):
            own, need = dist.box(rank, (1, 1, extent))[2], boxes.intervals(2, rank, extent)[0]
            below, above = own.start - max(0, need.start), min(extent, need.stop) - own.stop
            needed.append((max(0, below), max(0, above)))
        assert block_geometry.widest_halo(window, extent, out, comm.size, 0) == max(needed, key=sum)


def test_halos_of_transposed_convolutions_cover_every_input_that_touches_an_output():
    for kernel, stride, padding, dilation in itertools.product([2, 3, 4], [1, 2, 3], [0, 1], [1, 2]):
        extent, parts = 12, 3
        out = (extent - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
        window = KernelWindow((kernel,), (stride,), (padding,), (dilation,), True)
        most = 0
        for index in range(parts):
            own = block_range(extent, parts, index)
            outs = set(block_range(out, parts, index))
            touching = [i for i in range(extent) if {i * stride - padding + k * dilation for k in range(kernel)} & outs]
            most = max(most, max(0, own.start - min(touching)) + max(0, max(touching) + 1 - own.stop))
        # The range may begin and end with inputs that only lie between those that touch.
        assert most <= sum(block_geometry.widest_halo(window, extent, out, parts, 0)) <= most + 2 * (dilation - 1)


@pytest.mark.ranks(4, 6, 8)
def test_groups_and_strides_are_those_of_process_grids(comm):
    for axes in _grids(comm.size, ["n", "c", "h", "w"]):
        grid = dc.ProcessGrid(comm, r=comm.size // math.prod(axes.values()), **axes)
        parts = AxisParts.from_axes(axes, comm.size, 2)
        for axis, number in axes.items():
            if number > 1:
                here = grid.coords[axis]
                other = {**grid.coords, axis: here - 1 if here else here + 1}
                assert abs(grid.rank_of(other) - grid.rank) == parts.stride(axis)
        assert parts.parts_along("r") == grid.shape["r"]


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("axes", [{"h": 3, "w": 3}, {"n": 2, "h": 4, "w": 2}, {"h": 6, "w": 4}, {"n": 2, "h": 3}])
def test_neighbours_on_other_nodes_are_those_of_each_rank_by_itself(axes, per_node):
    parts = AxisParts.from_axes(axes, math.prod(axes.values()), per_node)
    for axis in set(axes) - {"n"}:
        found = []
        for rank in range(parts.size):
            at, index = parts.coords_of(rank), parts.coordinate(axis, rank)
            others = [parts.rank_of({**at, axis: i}) for i in (index - 1, index + 1) if 0 <= i < axes[axis]]
            found.append(sum(other // per_node != rank // per_node for other in others))
        assert parts.far_neighbours(axis) == max(found)
