"""Sampling at points, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process


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


def test_points_may_be_replicated_or_split_otherwise_than_the_input(comm):
    sample = partial(F.grid_sample, align_corners=False)
    x, at = normal(3, 2, 7, 5), points(3, 4, 6)
    for grid in grids(comm, "nch"):
        same_as_one_process(grid, sample, x, plain=(at,))
        same_as_one_process(grid, lambda at, x: sample(x, at), at, plain=(x,), dims=["nwh-"])
        same_as_one_process(grid, sample, x, at, dims=["nchw", "-wh-"])
        same_as_one_process(grid, sample, x[:1], at[:1, :2], dims=["nchw", "nhw-"])


def test_the_numbers_of_modes_are_torchs(comm):
    for mode in range(3):
        for padding in range(3):
            sample = partial(torch.grid_sampler, interpolation_mode=mode, padding_mode=padding, align_corners=False)
            same_as_one_process(
                grid_over(comm, h=comm.size), sample, normal(3, 2, 7, 5), points(3, 4, 6), dims=["nchw", "nhw-"]
            )


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


def test_points_of_other_samples_raise_torchs_error(comm):
    grid = grid_over(comm, h=comm.size)
    x, at = dc.scatter(normal(3, 2, 7, 5), grid), dc.scatter(points(2, 4, 6), grid, dims="nhw-")
    raises_everywhere(comm, dc.ShapeError, "batch size", lambda: F.grid_sample(x, at, align_corners=False))
