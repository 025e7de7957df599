"""Padding: constant, also negative, and from the input itself, against one process."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, close, same_as_one_process


@pytest.mark.parametrize("call", [lambda x: F.pad(x, [0, 0]), lambda x: F.pad(x, [0, 0, 0, 0], "reflect")])
def test_the_result_never_shares_memory_with_the_input(comm, call):
    x = dc.scatter(normal(2, 3, 7, 8), grid_over(comm, n=comm.size))
    call(x).zero_()
    close(dc.gather(x), normal(2, 3, 7, 8), "input")


PADS = [[1, 2], [0, 3, 2, 0], [3, 3, 3, 3], [0, 0, 4, 1]]


@pytest.mark.parametrize("pad", PADS, ids=str)
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@UP_TO_SIX_RANKS
def test_padding_equals_one_process(comm, mode, pad):
    if mode != "constant" and len(pad) == 2:
        pad = [*pad, 0, 0]
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, lambda x: F.pad(x, pad, mode), normal(2, 2, 7, 8))


def test_a_halo_of_padding_may_come_from_the_far_end(comm):
    for grid in grids(comm, "w"):
        same_as_one_process(grid, lambda x: F.pad(x, (7, 9), "circular"), normal(1, 1, 9))


@pytest.mark.parametrize(("mode", "pad"), [("reflect", [8, 0]), ("circular", [9, 0])])
def test_padding_wider_than_the_input_raises_torchs_error(comm, mode, pad):
    with pytest.raises(RuntimeError) as caught:
        F.pad(normal(1, 2, 8), pad, mode)
    x = dc.scatter(normal(1, 2, 8), grid_over(comm, w=comm.size))
    text = raises_everywhere(comm, dc.ShapeError, "[Pp]adding", lambda: F.pad(x, pad, mode))
    assert str(caught.value).splitlines()[0] in text


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.pad(x, [1, 2, 0, 1]),
        lambda x: F.pad(x, [1, 2, 0, 1], "reflect"),
        lambda x: F.pad(x, [0, 0, 0, 0, 1, 2]),
    ],
)
def test_split_channels_stay_split(comm, call):
    for shape in ((2, 5, 7, 8), (1, 2, 7, 8)):
        for grid in grids(comm, "chw"):
            y = same_as_one_process(grid, call, normal(*shape))
            assert y.dist.axes == ("n", "c", "h", "w")
