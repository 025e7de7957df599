"""Clouds to train and to test on, and their mini-batches as sparse tensors.

Every rank makes the voxels of the whole batch, which are few numbers next to a network's features. They follow from
seed, epoch and sample alone, never from how the ranks share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import together
from distconv.data.loader import Batch
from distconv.errors import DataError
from distconv.jobs.pointcloud.batches import Recipe, VoxelBatch, voxel_batch
from distconv.jobs.pointcloud.clouds import Cloud, Clouds
from distconv.jobs.pointcloud.datasets import PointClouds
from distconv.jobs.pointcloud.shapes import Shapes
from distconv.layers.sparse import SparseTensor

SHAPES, SHAPE_POINTS = {"train": 1000, "test": 200}, 2048
"""Embedded shapes of each group, and their points."""

_ORDER = 0
"""A stream of random numbers that no other must repeat."""


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

    def close(self) -> None:
        """Close the file, if there is one, on this rank."""
        if self._file is not None:
            self._file.close()


class VoxelLoader:
    """Batches of ``batch`` clouds of a group: what ``placed`` makes of the whole sparse tensor, and all labels.

    The last batch of an epoch may be smaller, or is dropped.

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
        recipe: Recipe,
        dtype: torch.dtype,
        device: str = "cpu",
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        self._source, self._clouds, self.batch, self._placed = samples, samples.groups[group], batch, placed
        self.recipe, self.dtype, self.device = recipe, dtype, device
        self.shuffle, self.drop_last = shuffle, drop_last
        self.samples = len(self._clouds.labels)
        self.points = min(recipe.points, self._clouds.points)
        if not self.steps:
            raise DataError(
                f"{samples.name}: no batch of {batch} can be made of the {self.samples} clouds of {group!r}"
            )
        if not round(recipe.keep * self.points):
            raise DataError(
                f"--keep {recipe.keep:g} of {self.points} points is none; keep more, or draw more with --points"
            )

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The clouds in the order of this epoch."""
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.recipe.seed, _ORDER, epoch)).permutation(self.samples)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step ``start`` on. Collective, as is each batch.

        Raises
        ------
        DataError
            On all ranks, if the file has changed, or any rank cannot read a cloud of a batch.
        """
        self._source.check_unchanged()
        order = self.order(number)
        for step in range(start, self.steps):
            samples = tuple(map(int, order[step * self.batch : (step + 1) * self.batch]))
            made = together(
                self._source.comm, partial(voxel_batch, self._clouds, samples, self.recipe, number), DataError
            )
            yield Batch(samples, (self._placed(self._sparse(made)), made.labels.to(self.device)))

    def first(self, count: int) -> SparseTensor:
        """The first clouds of the first epoch, ``count`` or as many as there are. Local."""
        return self._sparse(voxel_batch(self._clouds, list(map(int, self.order(0)[:count])), self.recipe, 0))

    def _sparse(self, made: VoxelBatch) -> SparseTensor:
        features = made.features.to(self.device, self.dtype)
        return SparseTensor(made.coords.to(self.device), features, batch_size=len(made.labels))
