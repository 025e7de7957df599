"""Conversion of points to the voxels that contain them: coordinates, features, parts.

Each voxel occurs once, and voxels are sorted by their coordinates. The same points thus give identical tensors on all
ranks. Everything is local and runs on torch tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distconv.errors import DataError

LARGEST = 1 << 20
"""Largest number of voxels along a side, since three coordinates are packed into an integer of 60 bits."""


@dataclass(frozen=True, eq=False)
class Voxels:
    """Filled voxels: coordinates int64 (V, 3), features (V, C), and the voxel of each point of the cloud, int64 (P)."""

    coords: torch.Tensor
    features: torch.Tensor
    of_point: torch.Tensor


def unit_cube(points: torch.Tensor) -> torch.Tensor:
    """Return points translated and scaled to touch two opposite sides of the unit cube.

    All dimensions have the same scale. The points are centered along the shorter dimensions.

    Parameters
    ----------
    points : Tensor
        Points (P, 3).

    Returns
    -------
    Tensor
        Points (P, 3) with coordinates from 0 to 1.

    Raises
    ------
    DataError
        If a coordinate, or the size of the cloud, is not finite.
    """
    if not len(points):
        return points
    low, high = points.amin(0), points.amax(0)  # NaN where a coordinate is
    extent = (high - low).amax()
    if not torch.isfinite(extent):
        nowhere = int((~torch.isfinite(points).all(1)).sum())
        raise DataError(
            f"a cloud of {len(points)} points has {nowhere} points that are not finite (range {low.tolist()} "
            f"to {high.tolist()}). Leave the cloud out, or write it again."
        )
    scaled = (points - low) - (high - low) / 2
    return (scaled / torch.where(extent > 0, extent, 1) + 0.5).clamp(0, 1)


def voxelise(points: torch.Tensor, resolution: int, *, offsets: bool = False) -> Voxels:
    """Return the voxels that contain points of the unit cube.

    Source: SparsePipe, section IV-B.

    Parameters
    ----------
    points : Tensor
        Points (P, 3) with coordinates from 0 to 1; P may be 0.
    resolution : int
        Number of voxels along each side of the cube.
    offsets : bool
        If True, three features are added: the mean position of the points in their voxel, from -1/2 to 1/2 around its
        center. Otherwise the only feature is 1, as in the paper.

    Returns
    -------
    Voxels
        The filled voxels.

    Raises
    ------
    DataError
        If ``resolution`` is out of range, or a point lies outside the unit cube.
    """
    if not 1 <= resolution <= LARGEST:
        raise DataError(f"resolution={resolution}: must be 1 to {LARGEST} voxels along each side")
    if len(points) and not 0 <= points.amin() <= points.amax() <= 1:
        raise DataError(
            f"points from {points.amin():g} to {points.amax():g} are not in the unit cube. Move them with unit_cube."
        )
    scaled = points * resolution
    cell = scaled.long().clamp(max=resolution - 1)  # the far side of the cube belongs to the last voxel
    # Keys in the order of the coordinates, so that unique() sorts the voxels.
    keys = (cell[:, 0] * resolution + cell[:, 1]) * resolution + cell[:, 2]
    unique, of_point = torch.unique(keys, return_inverse=True)
    coords = torch.stack([unique // resolution**2, unique // resolution % resolution, unique % resolution], 1)
    features = points.new_ones(len(coords), 1)
    if offsets:
        within = scaled - cell - 0.5
        sums = within.new_zeros(len(coords), 3).index_add_(0, of_point, within)
        counts = torch.bincount(of_point, minlength=len(coords))
        features = torch.cat([features, sums / counts[:, None]], 1)
    return Voxels(coords, features, of_point)


def majority_part(part: torch.Tensor, of_point: torch.Tensor, voxels: int) -> torch.Tensor:
    """Return the part to which most points of each voxel belong; the smallest part of a tie.

    Parameters
    ----------
    part : Tensor
        Part of each point, int64 (P).
    of_point : Tensor
        Voxel of each point, int64 (P).
    voxels : int
        Number of voxels, V.

    Returns
    -------
    Tensor
        Part of each voxel, int64 (V).
    """
    parts = int(part.max()) + 1 if len(part) else 1
    counts = torch.bincount(of_point * parts + part, minlength=voxels * parts)
    return counts.view(voxels, parts).argmax(1)
