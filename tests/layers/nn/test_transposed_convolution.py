"""Transposed convolution, against one process."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, built, check_module_same_as_one_process

SIZES = [(4, 4), (12, 12), (13, 5), (2, 12), (12, 2), (1, 3), (3, 1)]
"""C and F: gather-x where F is large, reduce-y where C is, the 2-D combination between, uneven and empty blocks."""


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(("kernel", "padding", "dilation"), [(4, 1, 1), (3, 2, 2), (1, 0, 1)])
@UP_TO_SIX_RANKS
def test_transposed_convolution_equals_one_process(comm, kernel, stride, padding, dilation, extra):
    if extra >= max(stride, dilation):
        extra = 0
    module = built(lambda: nn.ConvTranspose2d(2, 3, kernel, stride, padding, extra, dilation=dilation))
    for grid in grids(comm, "hw"):
        check_module_same_as_one_process(grid, module, normal(2, 2, 5, 4))


@pytest.mark.parametrize(("extra", "padding", "match"), [(2, 0, "output padding must be smaller"), (0, 4, "too small")])
def test_transposed_convolution_rejects_what_torch_rejects(comm, extra, padding, match):
    w, x = normal(2, 2, 3, 3), normal(1, 2, 2, 2)
    with pytest.raises(RuntimeError, match=match):
        F.conv_transpose2d(x, w, None, 2, padding, extra)
    raises_everywhere(
        comm,
        dc.ShapeError,
        match,
        lambda: F.conv_transpose2d(dc.scatter(x, grid_over(comm, h=comm.size)), w, None, 2, padding, extra),
    )


@pytest.mark.parametrize(("channels", "filters"), SIZES)
@pytest.mark.parametrize(("kernel", "stride", "padding", "extra"), [(3, 2, 1, 1)])
@UP_TO_SIX_RANKS
def test_split_channels_equal_one_process(comm, channels, filters, kernel, stride, padding, extra):
    module = built(lambda: nn.ConvTranspose2d(channels, filters, kernel, stride, padding, extra))
    for grid in grids(comm, "ch"):
        check_module_same_as_one_process(grid, module, normal(2, channels, 5, 4))


def test_every_option_counts_where_groups_do_not_divide_over_the_ranks(comm):
    """Three groups over two ranks, and two over three: all ranks compute all filters."""
    groups = 3 if comm.size % 3 else 2
    grid = grid_over(comm, c=comm.size)
    layer = built(
        lambda: nn.ConvTranspose2d(
            6 * groups, 6 * groups, 3, stride=3, padding=1, output_padding=2, groups=groups, dilation=2
        )
    )
    check_module_same_as_one_process(grid, layer, normal(2, 6 * groups, 5, 4))
