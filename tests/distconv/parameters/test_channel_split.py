"""Who holds which channels and filters: pure arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest

import distconv as dc
from distconv.parameters.channel_split import ChannelSplit, channel_split, linear_axes
from tests.distconv.layouts import grid_over


@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
def test_every_entry_of_the_weights_is_on_one_rank(blocks):
    split = ChannelSplit(7, 11, 1, 6, blocks)
    held = [(f, c) for i in range(6) for f in range(*split.output_filters(i)) for c in range(*split.input_channels(i))]
    assert sorted(held) == [(f, c) for f in range(11) for c in range(7)]


@pytest.mark.parametrize(("groups", "parts", "channels", "filters"), [(6, 3, 12, 6), (2, 6, 4, 12), (4, 4, 4, 8)])
def test_filters_have_the_channels_of_their_groups(groups, parts, channels, filters):
    split = channel_split(channels, filters, groups, parts)
    assert [f for i in range(parts) for f in range(*split.output_filters(i))] == list(range(filters))
    for index in range(parts):
        of = {f * groups // filters for f in range(*split.output_filters(index))}
        needed = [c for c in range(channels) if c * groups // channels in of]
        assert list(range(*split.input_channels(index))) == needed
        assert split.local_groups == len(of)


@pytest.mark.parametrize(("groups", "parts", "filters"), [(4, 3, 12), (2, 4, 6), (3, 2, 6)])
def test_groups_that_do_not_divide_are_refused(groups, parts, filters):
    with pytest.raises(dc.ShapeError, match=f"groups={groups}: .* the {parts} ranks of axis 'c'"):
        channel_split(groups, filters, groups, parts)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stride", [(), (1, 1), (2, 3), (4, 4, 4)])
@pytest.mark.parametrize(("channels", "filters"), [(8, 8), (64, 8), (8, 64), (3, 96)])
def test_no_other_split_moves_less(channels, filters, stride, transposed):
    parts = 12
    small, large = 1, math.prod(stride)
    x, y = (small, large) if transposed else (large, small)

    def moved(blocks):
        """Values that an index receives, of x and of y, if all blocks are equal."""
        return x * channels * (1 / blocks - 1 / parts) + y * filters * (blocks / parts - 1 / parts)

    chosen = channel_split(channels, filters, 1, parts, stride, transposed=transposed).blocks
    assert moved(chosen) == pytest.approx(min(map(moved, [1, 2, 3, 4, 6, 12])))


@pytest.mark.parametrize("transposed", [False, True])
def test_ranks_hold_the_weights_that_they_compute_with(comm, transposed):
    parts, grid = comm.size, grid_over(comm, c=comm.size)
    for groups, channels, filters in ((1, 7, 11), (2 * parts, 4 * parts, 6 * parts), (max(1, parts // 2), 24, 24)):
        if parts % groups and groups % parts:
            continue
        shape = (channels, filters // groups, 3) if transposed else (filters, channels // groups, 3)
        split = channel_split(channels, filters, groups, parts)
        layout = split.weight_layout(grid, shape, transposed=transposed)
        first, second, kernel = (range(*interval) for interval in layout.box(None, shape))
        used = {
            (c, f % shape[1]) if transposed else (f, c % shape[1])
            for c, f in itertools.product(
                range(*split.input_channels(comm.rank)), range(*split.output_filters(comm.rank))
            )
            if c * groups // channels == f * groups // filters
        }
        assert (set(itertools.product(first, second)), len(kernel)) == (used, 3)


def test_a_linear_layer_splits_samples_and_features():
    assert [linear_axes(ndim) for ndim in (1, 2, 4)] == [("n",), ("n", "c"), ("n", None, None, "c")]
