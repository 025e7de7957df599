"""Owned and needed index ranges of a convolution, compared with every input of its outputs."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from distconv.distribution import block_range
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.convolution_pieces import convolution_ranges
from distconv.perfmodel.cost.operation_work import channel_layout
from distconv.perfmodel.graph.tracing import trace


def operation(layer, shape):
    return trace(nn.Sequential(layer), shape).operations[0]


def most_ghost_rows(extent, out, parts, kernel, stride, padding, dilation):
    """Rows below and above that the rank with most of them lacks, from each output's window one by one."""
    found = []
    for index in range(parts):
        own = block_range(extent, parts, index)
        touched = {
            row
            for o in block_range(out, parts, index)
            for row in range(o * stride - padding, o * stride - padding + (kernel - 1) * dilation + 1)
        }
        inside = [row for row in touched if 0 <= row < extent]
        found.append(max(0, own.start - min(inside)) + max(0, max(inside) + 1 - own.stop))
    return max(found)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_needed_rows_are_those_that_the_outputs_of_the_rank_touch(kernel, stride):
    for extent, parts, dilation in itertools.product([13, 16, 18], [2, 3], [1, 2]):
        padding = kernel // 2
        op = operation(nn.Conv2d(4, 6, kernel, stride, padding, dilation), (2, 4, extent, 9))
        expected = most_ghost_rows(extent, op.y.shape[2], parts, kernel, stride, padding, dilation)
        found = convolution_ranges(op, AxisParts.from_axes({"h": parts}, parts, parts), None)
        if not expected:
            assert found is None
            continue
        (_, own, own_w), (channels, needed, needed_w) = found.own, found.needed
        assert (own[0] - needed[0]) + (needed[1] - own[1]) == expected
        assert channels == (0, 4) and own_w == needed_w == (0, 9)


def test_ghosts_are_what_is_needed_and_not_owned_each_element_once():
    op = operation(nn.Conv2d(4, 6, 3, padding=1), (2, 4, 12, 12))
    found = convolution_ranges(op, AxisParts.from_axes({"h": 3, "w": 3}, 9, 9), None)
    cells = [cell for box in found.ghosts() for cell in itertools.product(*(range(*side) for side in box))]
    whole = set(itertools.product(*(range(*side) for side in found.needed)))
    owned = set(itertools.product(*(range(*side) for side in found.own)))
    assert len(cells) == len(set(cells)) and set(cells) == whole - owned
    assert len(list(found.ghosts())) == 8 and len(owned) == 4 * 4 * 4
    assert found.name == "0+4+0x1+4+1x1+4+1"


@pytest.mark.parametrize("layer", [nn.MaxPool2d(3, padding=1), nn.ConvTranspose2d(4, 4, 3, padding=1)], ids=type)
def test_other_operations_have_no_pieces(layer):
    graph = trace(nn.Sequential(nn.Conv2d(4, 4, 1), layer), (2, 4, 8, 8))
    assert convolution_ranges(graph.operations[1], AxisParts.from_axes({"h": 2}, 2, 2), None) is None


def test_the_rank_with_the_most_channels_counts_where_they_do_not_divide():
    op = operation(nn.Conv2d(7, 32, 1), (2, 7, 6, 6))
    split = channel_layout(op, 3)
    extents = [split.input_channels(index).extent for index in range(split.parts)]
    found = convolution_ranges(op, AxisParts.from_axes({"c": 3}, 3, 3), split)
    assert found.needed[0] == (0, max(extents)) and found.own[0] == (0, 3)

    few = operation(nn.Conv2d(7, 3, 3, padding=1), (2, 7, 6, 6))  # fewer filters: partial sums of own channels
    split = channel_layout(few, 2)
    extents = [split.input_channels(index).extent for index in range(split.parts)]
    found = convolution_ranges(few, AxisParts.from_axes({"c": 2, "h": 3}, 6, 6), split)
    assert min(extents) < max(extents) and found.needed[0] == (0, max(extents))
