"""Interpolation in all modes, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process

TARGETS = [
    {"scale_factor": 0.5},
    {"scale_factor": (1.5, 2.6)},
    {"scale_factor": 1.3, "recompute_scale_factor": True},
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


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "area"])
@UP_TO_SIX_RANKS
def test_an_extent_that_stays_or_doubles_under_another_scale_is_as_in_one_process(comm, mode, count):
    # torch takes it in ways of its own: for each number of dimensions, and for gradients.
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[count]
    for scale in (1.3, 2.1, (1.0, 1.3, 2.0)[:count]):
        resize = torch.nn.Upsample(scale_factor=scale, mode=linear if mode == "linear" else mode)
        for grid in grids(comm, ("w", "hw", "dw")[count - 1]):
            same_as_one_process(grid, resize, normal(2, 2, *(3,) * count))


@pytest.mark.parametrize("options", [{}, {"align_corners": True}, {"antialias": True}], ids=str)
def test_an_extent_that_stays_in_other_modes(comm, options):
    for mode in ("bilinear", "bicubic"):
        for again in (None, True):
            resize = partial(F.interpolate, scale_factor=(1.3, 1.7), recompute_scale_factor=again, mode=mode, **options)
            for grid in grids(comm, "hw"):
                same_as_one_process(grid, resize, normal(2, 2, 3, 3))


def test_interpolation_and_its_gradient_are_adjoint(comm):
    for grid in grids(comm, "nhw"):
        x = dc.scatter(normal(3, 2, 7, 9), grid).requires_grad_()
        y = F.interpolate(x, size=(12, 5), mode="bilinear", align_corners=True)
        other = normal(*y.shape, seed=1)
        forward = (y * other).sum().item()
        y.backward(other)
        assert forward == pytest.approx((x.detach() * x.grad).sum().item(), rel=1e-12)


def test_an_output_without_elements_raises_torchs_error(comm):
    call = partial(F.interpolate, scale_factor=0.5, mode="bilinear")
    with pytest.raises(RuntimeError) as caught:
        call(normal(1, 2, 1, 8))
    x = dc.scatter(normal(1, 2, 1, 8), grid_over(comm, w=comm.size))
    text = raises_everywhere(comm, dc.ShapeError, "greater than 0", lambda: call(x))
    assert str(caught.value) in text


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.interpolate(x, size=(5, 9), mode="bilinear"),
    ],
)
def test_split_channels_stay_split(comm, call):
    for shape in ((2, 5, 7, 8), (1, 2, 7, 8)):
        for grid in grids(comm, "chw"):
            y = same_as_one_process(grid, call, normal(*shape))
            assert y.dist.axes == ("n", "c", "h", "w")
