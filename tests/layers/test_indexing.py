"""Interpolation, padding: outputs that take given inputs, wherever these are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.core.layouts import grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process

TARGETS = [
    {"scale_factor": 2},
    {"scale_factor": 3},
    {"scale_factor": 0.5},
    {"scale_factor": (1.5, 2.6)},
    {"scale_factor": 1.3, "recompute_scale_factor": True},
    {"size": (7, 9)},
    {"size": (14, 3)},
    {"size": 1},
    {"size": (5, 16)},
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(
    "mode",
    [{"mode": "nearest"}, {"mode": "nearest-exact"}]
    + [{"mode": "bilinear", "align_corners": corners} for corners in (False, True)],
    ids=lambda mode: " ".join(map(str, mode.values())),
)
@UP_TO_SIX_RANKS
def test_interpolation_equals_one_process(comm, mode, target):
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, partial(F.interpolate, **mode, **target), normal(2, 2, 7, 8))


@pytest.mark.parametrize("mode", ["area", "bicubic"])
def test_other_modes_gather_space(comm, mode):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, partial(F.interpolate, size=(5, 9), mode=mode), normal(2, 2, 7, 8))


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("factor", [2, 1.7, 0.4])
def test_interpolation_in_one_and_three_dimensions(comm, corners, factor):
    for count, mode, axes in ((1, "linear", "nw"), (3, "trilinear", "dw")):
        resize = partial(F.interpolate, scale_factor=factor, mode=mode, align_corners=corners)
        for grid in grids(comm, axes):
            same_as_one_process(grid, resize, normal(2, 2, *(4, 3, 7)[3 - count :]))


def test_ranks_without_rows_take_part_in_interpolation(comm):
    for grid in grids(comm, "nhw"):
        for options in ({"size": (9, 1)}, {"scale_factor": 2, "mode": "bilinear"}, {"size": (2, 2)}):
            same_as_one_process(grid, partial(F.interpolate, **options), normal(1, 2, 2, 3))


def test_interpolation_and_its_gradient_are_adjoint(comm):
    for grid in grids(comm, "nhw"):
        x = dc.scatter(normal(3, 2, 7, 9), grid).requires_grad_()
        y = F.interpolate(x, size=(12, 5), mode="bilinear", align_corners=True)
        other = normal(*y.shape, seed=1)
        forward = (y * other).sum().item()
        y.backward(other)
        assert forward == pytest.approx((x.detach() * x.grad).sum().item(), rel=1e-12)


def test_an_output_without_elements_is_refused_in_torchs_words(comm):
    call = partial(F.interpolate, scale_factor=0.5, mode="bilinear")
    with pytest.raises(RuntimeError) as told:
        call(normal(1, 2, 1, 8))
    x = dc.scatter(normal(1, 2, 1, 8), grid_over(comm, w=comm.size))
    text = raises_everywhere(comm, dc.ShapeError, "greater than 0", lambda: call(x))
    assert str(told.value) in text


PADS = [[1, 2], [0, 3, 2, 0], [3, 3, 3, 3], [0, 0, 4, 1]]


@pytest.mark.parametrize("pad", PADS, ids=str)
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@UP_TO_SIX_RANKS
def test_padding_equals_one_process(comm, mode, pad):
    if mode != "constant" and len(pad) == 2:
        pad = [*pad, 0, 0]
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, lambda x: F.pad(x, pad, mode), normal(2, 2, 7, 8))


@pytest.mark.parametrize("pad", [[-1, 2], [-2, -3, 1, -1], [1, 1, -3, -3], [-8, 9]], ids=str)
def test_constant_padding_may_cut(comm, pad):
    for grid in grids(comm, "hw"):
        same_as_one_process(grid, lambda x: F.pad(x, pad, value=1.5), normal(2, 2, 7, 9))


@pytest.mark.parametrize("pad", [[0, 0, 0, 0, 1, 2], [0, 0, 1, 0, 2, 0, 0, 1]], ids=str)
def test_channels_and_samples_may_be_padded(comm, pad):
    for grid in grids(comm, "nh"):
        same_as_one_process(grid, lambda x: F.pad(x, pad), normal(2, 2, 7, 3))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_in_one_and_three_dimensions(comm, mode):
    for grid in grids(comm, "w"):
        same_as_one_process(grid, lambda x: F.pad(x, (3, 2), mode), normal(2, 2, 9))
        same_as_one_process(grid, lambda x: F.pad(x, (2, 1, 1, 0, 1, 1), mode), normal(1, 2, 3, 4, 7))


def test_a_halo_of_padding_may_come_from_the_far_end(comm):
    for grid in grids(comm, "w"):
        same_as_one_process(grid, lambda x: F.pad(x, (7, 9), "circular"), normal(1, 1, 9))


def test_any_layout_of_the_input_will_do(comm):
    for dist in twenty_layouts(comm, (5, 7, 6)):
        if dist.split[1] is None:
            same_as_one_process(dist, lambda x: F.pad(x, (1, 2), "reflect"), normal(5, 7, 6))


@pytest.mark.parametrize(("mode", "pad"), [("reflect", [8, 0]), ("circular", [9, 0])])
def test_padding_wider_than_the_input_is_refused_in_torchs_words(comm, mode, pad):
    with pytest.raises(RuntimeError) as told:
        F.pad(normal(1, 2, 8), pad, mode)
    x = dc.scatter(normal(1, 2, 8), grid_over(comm, w=comm.size))
    text = raises_everywhere(comm, dc.ShapeError, "[Pp]adding", lambda: F.pad(x, pad, mode))
    assert str(told.value).splitlines()[0] in text


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("call", [lambda x: F.pad(x, [1, 1]), lambda x: F.interpolate(x, scale_factor=2)])
def test_split_channels_are_refused(comm, call):
    x = dc.scatter(torch.zeros(1, 8, 7, 8), grid_over(comm, c=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "its channels are split", lambda: call(x))
