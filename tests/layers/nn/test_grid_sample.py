"""Sampling at points, against one process."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process


def points(*shape):
    """Points of which some lie outside of the input."""
    return 0.7 * normal(*shape, 2, seed=5)


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
