"""Interpolation, padding: outputs that take given inputs, wherever these are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import UP_TO_SIX_RANKS, close, same_as_one_process

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


@pytest.mark.parametrize(
    "options",
    [{"mode": "area"}, {"mode": "bicubic"}, {"mode": "bicubic", "align_corners": True}]
    + [{"mode": mode, "antialias": True} for mode in ("bilinear", "bicubic")],
    ids=lambda options: " ".join(map(str, options.values())),
)
@UP_TO_SIX_RANKS
def test_other_modes_equal_one_process(comm, options):
    for grid in grids(comm, "ch"):
        for target in ({"size": (5, 9)}, {"scale_factor": (0.4, 1.7)}, {"size": (14, 3)}):
            same_as_one_process(grid, partial(F.interpolate, **target, **options), normal(2, 3, 7, 8))


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


def test_an_infinity_spreads_as_in_one_process(comm):
    x = normal(1, 2, 4, 5)
    x[0, 0, 1, 2], x[0, 1, 3, 4] = torch.inf, -torch.inf
    for grid in grids(comm, "hw"):
        for options in ({"size": (5, 13)}, {"size": (9, 3), "align_corners": True}):
            found = F.interpolate(dc.scatter(x, grid), mode="bilinear", **options)
            close(dc.gather(found), F.interpolate(x, mode="bilinear", **options), "infinities")


@pytest.mark.parametrize("call", [lambda x: F.pad(x, [0, 0]), lambda x: F.pad(x, [0, 0, 0, 0], "reflect")])
def test_the_result_never_shares_memory_with_the_input(comm, call):
    x = dc.scatter(normal(2, 3, 7, 8), grid_over(comm, n=comm.size))
    call(x).zero_()
    close(dc.gather(x), normal(2, 3, 7, 8), "input")


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_without_a_sample_dimension(comm, mode):
    for grid in grids(comm, "cw"):
        same_as_one_process(grid, lambda x: F.pad(x, (1, 2, 0, 1), mode), normal(3, 7, 8), dims=["chw"])


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


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.pad(x, [1, 2, 0, 1]),
        lambda x: F.pad(x, [1, 2, 0, 1], "reflect"),
        lambda x: F.pad(x, [0, 0, 0, 0, 1, 2]),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.interpolate(x, size=(5, 9), mode="bilinear"),
    ],
)
def test_split_channels_stay_split(comm, call):
    for shape in ((2, 5, 7, 8), (1, 2, 7, 8)):
        for grid in grids(comm, "chw"):
            y = same_as_one_process(grid, call, normal(*shape))
            assert y.dist.axes == ("n", "c", "h", "w")


# -- sampling at given points -----------------------------------------------------------------------------------------


def points(*shape):
    """Points of which some lie outside of the input."""
    return 0.7 * normal(*shape, 2, seed=5)


@pytest.mark.parametrize(
    ("mode", "padding_mode", "corners"),
    [
        ("bilinear", "zeros", False),
        ("bilinear", "border", True),
        ("nearest", "reflection", False),
        ("bicubic", "zeros", True),
    ],
)
@UP_TO_SIX_RANKS
def test_sampling_equals_one_process(comm, mode, padding_mode, corners):
    sample = partial(F.grid_sample, mode=mode, padding_mode=padding_mode, align_corners=corners)
    for grid in grids(comm, "ch"):
        same_as_one_process(grid, sample, normal(3, 2, 7, 5), points(3, 4, 6), dims=["nchw", "nhw-"])


def test_points_may_be_whole_or_split_otherwise_than_the_input(comm):
    sample = partial(F.grid_sample, align_corners=False)
    x, at = normal(3, 2, 7, 5), points(3, 4, 6)
    for grid in grids(comm, "nch"):
        same_as_one_process(grid, sample, x, plain=(at,))
        same_as_one_process(grid, lambda at, x: sample(x, at), at, plain=(x,), dims=["nwh-"])
        same_as_one_process(grid, sample, x, at, dims=["nchw", "-wh-"])
        same_as_one_process(grid, sample, x[:1], at[:1, :2], dims=["nchw", "nhw-"])


def test_sampling_in_three_dimensions(comm):
    at = 0.7 * normal(1, 2, 3, 4, 3, seed=5)
    for grid in grids(comm, "dw"):
        same_as_one_process(
            grid, partial(F.grid_sample, align_corners=True), normal(1, 2, 3, 5, 4), at, dims=["ncdhw", "ndhw-"]
        )


def test_a_spatial_transformer_equals_one_process(comm):
    def transformed(x, theta):
        return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)

    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, transformed, normal(3, 2, 7, 5), normal(3, 2, 3, seed=1), dims=["nchw", "n--"])
        same_as_one_process(grid, transformed, normal(3, 2, 7, 5), plain=(normal(3, 2, 3, seed=1),))


def test_points_of_other_samples_are_refused_in_torchs_words(comm):
    grid = grid_over(comm, h=comm.size)
    x, at = dc.scatter(normal(3, 2, 7, 5), grid), dc.scatter(points(2, 4, 6), grid, dims="nhw-")
    raises_everywhere(comm, dc.ShapeError, "batch size", lambda: F.grid_sample(x, at, align_corners=False))
