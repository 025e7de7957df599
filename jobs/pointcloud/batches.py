"""Mini-batches of voxels: the clouds of a step, drawn, voxelised and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distconv.errors import DataError

from .clouds import Clouds
from .sampling import DRAWN_POINTS, drawn
from .voxels import Voxels, majority, unit_cube, voxelise


@dataclass(frozen=True)
class VoxelRecipe:
    """How clouds become voxels: along each side, points drawn, the share of them that is kept, features, seed."""

    resolution: int
    points: int = DRAWN_POINTS
    keep: float = 1.0
    varied: bool = False
    """Each cloud's share is drawn from 0 to ``keep``."""
    offsets: bool = False
    seed: int = 0


@dataclass(frozen=True, eq=False)
class VoxelBatch:
    """Voxels of N clouds.

    Coordinates int64 (V, 4), the index of the cloud first, then x, y, z; features (V, C); the classes of the clouds
    int64 (N); the part of each voxel, int64 (V), where clouds have parts. A cloud may have no voxel.
    """

    coords: torch.Tensor
    features: torch.Tensor
    labels: torch.Tensor
    part: torch.Tensor | None = None


def voxel_batch(clouds: Clouds, samples: Sequence[int], recipe: VoxelRecipe, epoch: int) -> VoxelBatch:
    """The voxels of these clouds in this epoch. Local; it depends on nothing but the arguments."""
    voxels, parts = [], []
    for sample in samples:
        cloud = clouds[sample]
        taken = drawn(
            len(cloud.points),
            recipe.points,
            recipe.keep,
            varied=recipe.varied,
            seed=recipe.seed,
            epoch=epoch,
            sample=sample,
        )
        # The whole cloud sets the scale: it must not move with the points that happen to be drawn.
        points = unit_cube(torch.from_numpy(cloud.points))[torch.from_numpy(taken)]
        voxels.append(voxelise(points, recipe.resolution, offsets=recipe.offsets))
        if cloud.part is not None:
            parts.append(majority(torch.from_numpy(cloud.part[taken]), voxels[-1].of_point, len(voxels[-1].coords)))
    labels = torch.as_tensor(clouds.labels)[list(samples)]
    return collated(voxels, labels, torch.cat(parts) if parts else None)


def collated(voxels: Sequence[Voxels], labels: torch.Tensor, part: torch.Tensor | None = None) -> VoxelBatch:
    """The voxels of several clouds with the cloud's index as first coordinate, as one batch.

    Raises
    ------
    DataError
        If there is no cloud, or not one label for each.
    """
    if not voxels or len(labels) != len(voxels):
        raise DataError(f"a batch of {len(voxels)} clouds with {len(labels)} labels: give one for each, one at least")
    index = torch.arange(len(voxels)).repeat_interleave(torch.tensor([len(each.coords) for each in voxels]))
    coords = torch.cat([each.coords for each in voxels])
    features = torch.cat([each.features for each in voxels])
    return VoxelBatch(torch.cat([index[:, None], coords], 1), features, labels, part)
