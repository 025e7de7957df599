"""Mini-batches of voxels: points drawn from clouds, voxelized and concatenated.

Local: every rank that calls :func:`voxel_batch` with the same arguments gets the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distconv.errors import DataError

from .clouds import Clouds
from .sampling import DRAWN_POINTS, draw_points
from .voxels import Voxels, majority_part, unit_cube, voxelise


@dataclass(frozen=True)
class VoxelRecipe:
    """Settings of the conversion of clouds to voxels: of :func:`.sampling.draw_points` and :func:`.voxels.voxelise`."""

    resolution: int
    points: int = DRAWN_POINTS
    keep: float = 1.0
    varied: bool = False
    """If True, the fraction of each cloud is drawn from 0 to ``keep``. Otherwise it is ``keep``."""
    offsets: bool = False
    seed: int = 0


@dataclass(frozen=True, eq=False)
class VoxelBatch:
    """Voxels of N clouds. A cloud may have no voxel.

    Attributes
    ----------
    coords : Tensor
        int64 (V, 4): index of the cloud, then x, y, z.
    features : Tensor
        Features (V, C).
    labels : Tensor
        Classes of the clouds, int64 (N).
    part : Tensor, optional
        Part of each voxel, int64 (V); None if the clouds have no parts.
    """

    coords: torch.Tensor
    features: torch.Tensor
    labels: torch.Tensor
    part: torch.Tensor | None = None


def voxel_batch(clouds: Clouds, samples: Sequence[int], recipe: VoxelRecipe, epoch: int) -> VoxelBatch:
    """Return the voxels of some clouds in an epoch. Local; the result depends on the arguments alone.

    Parameters
    ----------
    clouds : Clouds
        A set of clouds.
    samples : sequence of int
        Indices of the clouds.
    recipe : VoxelRecipe
        Points to draw, and the voxel grid.
    epoch : int
        The epoch, which determines the points drawn.

    Returns
    -------
    VoxelBatch
        The voxels, in the order of ``samples``.
    """
    voxels, parts = [], []
    for sample in samples:
        cloud = clouds[sample]
        taken = draw_points(
            len(cloud.points),
            recipe.points,
            recipe.keep,
            varied=recipe.varied,
            seed=recipe.seed,
            epoch=epoch,
            sample=sample,
        )
        # All points of the cloud determine the scale, so that it does not depend on the points drawn.
        points = unit_cube(torch.from_numpy(cloud.points))[torch.from_numpy(taken)]
        voxels.append(voxelise(points, recipe.resolution, offsets=recipe.offsets))
        if cloud.part is not None:
            parts.append(
                majority_part(torch.from_numpy(cloud.part[taken]), voxels[-1].of_point, len(voxels[-1].coords))
            )
    labels = torch.as_tensor(clouds.labels)[list(samples)]
    return collate(voxels, labels, torch.cat(parts) if parts else None)


def collate(voxels: Sequence[Voxels], labels: torch.Tensor, part: torch.Tensor | None = None) -> VoxelBatch:
    """Concatenate the voxels of several clouds; the index of the cloud becomes the first coordinate.

    Parameters
    ----------
    voxels : sequence of Voxels
        The voxels of each cloud.
    labels : Tensor
        Classes of the clouds, int64 (N).
    part : Tensor, optional
        Part of each voxel, int64 (V).

    Returns
    -------
    VoxelBatch
        One batch.

    Raises
    ------
    DataError
        If there is no cloud, or the number of labels differs from the number of clouds.
    """
    if not voxels or len(labels) != len(voxels):
        raise DataError(
            f"batch of {len(voxels)} clouds with {len(labels)} labels: each cloud needs a label, and at least "
            "one cloud is required"
        )
    index = torch.arange(len(voxels)).repeat_interleave(torch.tensor([len(each.coords) for each in voxels]))
    coords = torch.cat([each.coords for each in voxels])
    features = torch.cat([each.features for each in voxels])
    return VoxelBatch(torch.cat([index[:, None], coords], 1), features, labels, part)
