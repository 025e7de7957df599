"""Clouds to train and to test on, and their mini-batches as sparse tensors.

Every rank makes the voxels of the whole batch, which are few numbers next to a network's features. They follow from
seed, epoch and sample alone, never from how the ranks share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.loader import Batch, EpochLoader
from distconv.errors import DataError
from distconv.jobs.pointcloud.batches import VoxelBatch, VoxelRecipe, voxel_batch
from distconv.jobs.pointcloud.clouds import Cloud, Clouds
from distconv.jobs.pointcloud.datasets import PointClouds
from distconv.jobs.pointcloud.shapes import Shapes
from distconv.layers.sparse import SparseTensor

SHAPES, SHAPE_POINTS = {"train": 1000, "test": 200}, 2048
"""Embedded shapes of each group, and their points."""


class Kept:
    """Clouds that are asked for once and kept in memory."""

    def __init__(self, clouds: Clouds) -> None:
        self.points, self.labels = clouds.points, clouds.labels
        self.class_names, self.part_names = clouds.class_names, clouds.part_names
        self._clouds = [clouds[index] for index in range(len(clouds.labels))]

    def __getitem__(self, index: int) -> Cloud:
        """One cloud."""
        return self._clouds[index]


class CloudSamples:
    """The clouds of a file or a folder, or without a ``path`` the embedded shapes, which are always the same.

    Collective. ``groups`` has ``train`` and, where there are such clouds, ``test``.

    Raises
    ------
    DataError
        On all ranks, if files are missing or not what they should be.
    """

    def __init__(self, path: Path | None, comm: MPI.Intracomm) -> None:
        self.comm, self._file = comm, None if path is None else PointClouds(path, comm)
        self.groups: Mapping[str, Clouds]
        if self._file is None:
            self.name, self.class_names = "embedded shapes", Shapes.class_names
            self.groups = {
                group: Kept(Shapes(count, SHAPE_POINTS, group=number))
                for number, (group, count) in enumerate(SHAPES.items())
            }
        else:
            self.name, self.class_names, self.groups = str(path), self._file.class_names, self._file.groups

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if a file was replaced or changed since it was opened. Collective."""
        if self._file is not None:
            self._file.check_unchanged()

    def place(self, group: str) -> object:
        """The file or folder."""
        return self.name

    def close(self) -> None:
        """Close the file, if there is one, on this rank."""
        if self._file is not None:
            self._file.close()


class VoxelLoader(EpochLoader):
    """Batches of ``batch`` clouds of a group: what ``placed`` makes of the whole sparse tensor, and all labels.

    Raises
    ------
    DataError
        If no batch can be made, or the recipe keeps no point.
    """

    def __init__(
        self,
        samples: CloudSamples,
        group: str,
        batch: int,
        *,
        placed: Callable[[SparseTensor], Any],
        recipe: VoxelRecipe,
        dtype: torch.dtype,
        device: str = "cpu",
        **order: bool,
    ) -> None:
        self._source, self._clouds, self._placed = samples, samples.groups[group], placed
        of = (samples.name, f"clouds of {group!r}")
        super().__init__(len(self._clouds.labels), batch, of, seed=recipe.seed, **order)
        self.recipe, self.dtype, self.device = recipe, dtype, device
        self.points = min(recipe.points, self._clouds.points)
        if not round(recipe.keep * self.points):
            raise DataError(
                f"--keep {recipe.keep:g} of {self.points} points is none; keep more, or draw more with --points"
            )

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step ``start`` on. Collective, as is each batch.

        Raises
        ------
        DataError
            On all ranks, if the file has changed, or any rank cannot read a cloud of a batch.
        """
        self._source.check_unchanged()
        for samples in self.batches(number, start):
            voxels = try_on_all_ranks(
                self._source.comm, partial(voxel_batch, self._clouds, samples, self.recipe, number), DataError
            )
            yield Batch(samples, (self._placed(self._sparse(voxels)), voxels.labels.to(self.device)))

    def first(self, count: int) -> SparseTensor:
        """The first clouds of the first epoch, ``count`` or as many as there are. Local."""
        return self._sparse(voxel_batch(self._clouds, list(map(int, self.order(0)[:count])), self.recipe, 0))

    def _sparse(self, voxels: VoxelBatch) -> SparseTensor:
        features = voxels.features.to(self.device, self.dtype)
        return SparseTensor(voxels.coords.to(self.device), features, batch_size=len(voxels.labels))
