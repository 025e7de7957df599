"""From points to the voxels they fill: coordinates, features, parts.

A voxel is at most once in a list, and voxels are in the order of their coordinates, so that the same points give the
same tensors everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distconv.errors import DataError

LARGEST = 1 << 20
"""Voxels along a side: three coordinates make one number of 60 bits."""


@dataclass(frozen=True, eq=False)
class Voxels:
    """Filled voxels: coordinates int64 (V, 3), features (V, C), and the voxel of each point of the cloud, int64 (P)."""

    coords: torch.Tensor
    features: torch.Tensor
    of_point: torch.Tensor


def unit_cube(points: torch.Tensor) -> torch.Tensor:
    """Points (P, 3) moved and scaled alike along all dimensions until they touch opposite sides of the unit cube.

    Along the shorter dimensions they lie in the middle; a single point does so along all.

    Raises
    ------
    DataError
        If a coordinate is not finite, or the extent of the cloud is not.
    """
    if not len(points):
        return points
    low, high = points.amin(0), points.amax(0)  # NaN where a coordinate is
    extent = (high - low).amax()
    if not torch.isfinite(extent):
        nowhere = int((~torch.isfinite(points).all(1)).sum())
        raise DataError(
            f"a cloud of {len(points)} points reaches from {low.tolist()} to {high.tolist()} and {nowhere} of them are "
            f"nowhere; leave it out, or write it again"
        )
    scaled = (points - low) - (high - low) / 2
    return (scaled / torch.where(extent > 0, extent, 1) + 0.5).clamp(0, 1)


def voxelise(points: torch.Tensor, resolution: int, *, offsets: bool = False) -> Voxels:
    """The voxels of a grid of ``resolution`` along each side that points (P, 3) of the unit cube fill.

    Features: 1 for a filled voxel, as in the paper. With ``offsets`` three more: where in the voxel its points lie on
    average, from -1/2 to 1/2 about its centre. No points fill no voxel.

    Source: SparsePipe, section IV-B.

    Raises
    ------
    DataError
        If the resolution is impossible, or a point is not in the unit cube.
    """
    if not 1 <= resolution <= LARGEST:
        raise DataError(f"a grid of {resolution} voxels along a side: give 1 to {LARGEST}")
    if len(points) and not 0 <= points.amin() <= points.amax() <= 1:
        raise DataError(
            f"points from {points.amin():g} to {points.amax():g} are not in the unit cube; move them with unit_cube"
        )
    scaled = points * resolution
    cell = scaled.long().clamp(max=resolution - 1)  # the far side of the cube belongs to the last voxel
    keys = (cell[:, 0] * resolution + cell[:, 1]) * resolution + cell[:, 2]
    unique, of_point = torch.unique(keys, return_inverse=True)
    coords = torch.stack([unique // resolution**2, unique // resolution % resolution, unique % resolution], 1)
    features = points.new_ones(len(coords), 1)
    if offsets:
        features = torch.cat([features, _mean(scaled - cell - 0.5, of_point, len(coords))], 1)
    return Voxels(coords, features, of_point)


def majority(part: torch.Tensor, of_point: torch.Tensor, voxels: int) -> torch.Tensor:
    """The part (V) that most points of each voxel belong to, the first of those with as many."""
    parts = int(part.max()) + 1 if len(part) else 1
    counts = torch.bincount(of_point * parts + part, minlength=voxels * parts)
    return counts.view(voxels, parts).argmax(1)


def _mean(values: torch.Tensor, of_point: torch.Tensor, voxels: int) -> torch.Tensor:
    """Mean of the values (P, C) of the points in each voxel (V, C)."""
    counts = torch.bincount(of_point, minlength=voxels)
    return values.new_zeros(voxels, values.shape[1]).index_add_(0, of_point, values) / counts[:, None]
