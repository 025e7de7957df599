"""Pixel and channel shuffles, unfold and fold, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import counting, grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process


@pytest.mark.parametrize("shape", [(2, 8, 7, 5), (1, 36, 3, 2), (12, 7, 5), (2, 1, 8, 3, 2)])
@UP_TO_SIX_RANKS
def test_pixel_shuffle_and_its_inverse_equal_one_process(comm, shape):
    dims = {3: "chw", 4: "nchw", 5: "n-chw"}[len(shape)]
    for grid in grids(comm, "nch"):
        y = same_as_one_process(grid, lambda x: F.pixel_shuffle(x, 2), normal(*shape), dims=[dims])
        same_as_one_process(grid, lambda x: F.pixel_unshuffle(x, 2), normal(*y.shape), dims=[dims])
        same_as_one_process(grid, lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), normal(*shape), dims=[dims])


@pytest.mark.ranks(at_least=2)
def test_pixel_shuffle_gathers_no_space(comm):
    x = dc.scatter(normal(1, 4, 8 * comm.size + 1, 3), grid_over(comm, h=comm.size))
    with count_traffic() as traffic:
        F.pixel_shuffle(x, 2)
    assert sum(traffic.sent.values()) <= 2 * 6 * 8


@pytest.mark.parametrize("shape", [(2, 6, 7, 5), (1, 6, 3), (2, 6, 2, 3, 4)])
def test_channel_shuffle_equals_one_process(comm, shape):
    for groups in (2, 3):
        for grid in grids(comm, "ncw"):
            same_as_one_process(grid, lambda x, g=groups: F.channel_shuffle(x, g), normal(*shape))
            same_as_one_process(grid, lambda x, g=groups: torch.native_channel_shuffle(x, g), counting(*shape).long())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.unfold(x, 3, padding=1, stride=2),
        lambda x: F.fold(F.unfold(x, (2, 3), dilation=2), (7, 9), (2, 3), dilation=2),
        lambda x: F.fold(F.unfold(x, 2, stride=2).relu() * 2, (7, 9), 2, stride=2),
    ],
)
def test_unfold_and_fold_equal_one_process(comm, call):
    for grid in grids(comm, "ch"):
        same_as_one_process(grid, call, normal(3, 2, 7, 9))
    for grid in grids(comm, "ch"):
        same_as_one_process(grid, call, normal(2, 7, 9), dims=["chw"])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: F.pixel_shuffle(x, 3), "divisible by the square of upscale_factor"),
        (lambda x: F.pixel_unshuffle(x, 2), "divisible by downscale_factor"),
        (lambda x: F.channel_shuffle(x, 3), "divisible by groups"),
        (lambda x: F.unfold(x, 9), "sliding blocks"),
    ],
)
def test_arguments_that_torch_rejects_raise_its_error(comm, call, match):
    with pytest.raises(RuntimeError, match=match):
        call(normal(2, 4, 7, 5))
    x = dc.scatter(normal(2, 4, 7, 5), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.ShapeError, match, lambda: call(x))
