"""Training and test clouds, and their mini-batches as sparse tensors.

Every rank computes the voxels of the full mini-batch, which are small compared with a network's features. They depend
on seed, epoch and sample alone, never on the process grid.
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
"""Number of embedded shapes in each group, and points of each shape."""


class CachedClouds:
    """Clouds that are read once and kept in memory."""

    def __init__(self, clouds: Clouds) -> None:
        self.points, self.labels = clouds.points, clouds.labels
        self.class_names, self.part_names = clouds.class_names, clouds.part_names
        self._clouds = [clouds[index] for index in range(len(clouds.labels))]

    def __getitem__(self, index: int) -> Cloud:
        """Return one cloud."""
        return self._clouds[index]


class CloudSamples:
    """Clouds of a file or a folder, or the embedded shapes. Collective: construct on every rank.

    ``groups`` has ``train`` and, if there are test clouds, ``test``.

    Parameters
    ----------
    path : Path, optional
        A data set for :class:`distconv.jobs.pointcloud.datasets.PointClouds`; None for the embedded shapes, which are
        the same in every run.
    comm : MPI.Intracomm
        The ranks that read the clouds.

    Raises
    ------
    DataError
        On all ranks, if files are missing or invalid.
    """

    def __init__(self, path: Path | None, comm: MPI.Intracomm) -> None:
        self.comm, self._file = comm, None if path is None else PointClouds(path, comm)
        self.groups: Mapping[str, Clouds]
        if self._file is None:
            self.name, self.class_names = "embedded shapes", Shapes.class_names
            self.groups = {
                group: CachedClouds(Shapes(count, SHAPE_POINTS, group=number))
                for number, (group, count) in enumerate(SHAPES.items())
            }
        else:
            self.name, self.class_names, self.groups = str(path), self._file.class_names, self._file.groups

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if a file was replaced or changed since it was opened. Collective."""
        if self._file is not None:
            self._file.check_unchanged()

    def source_path(self, group: str) -> object:
        """Return the file or folder."""
        return self.name

    def close(self) -> None:
        """Close the file, if there is one, on this rank."""
        if self._file is not None:
            self._file.close()


class VoxelLoader(EpochLoader):
    """Loader of sparse tensors and labels.

    Parameters
    ----------
    samples : CloudSamples
        The data set.
    group : str
        ``train`` or ``test``.
    batch : int
        Clouds in a global mini-batch.
    placed : callable
        Called with the full sparse tensor of a mini-batch; returns the input of the network.
    recipe : VoxelRecipe
        Points to draw, and the voxel grid.
    dtype : torch.dtype
        Data type of the features.
    device : str
        Device of features and labels.
    **order
        Options of :class:`distconv.data.loader.EpochLoader`.

    Raises
    ------
    DataError
        If there are too few clouds for a batch, or the recipe keeps no point.
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
        self._source, self._clouds, self._prepare_input = samples, samples.groups[group], placed
        names = (samples.name, f"clouds of {group!r}")
        super().__init__(len(self._clouds.labels), batch, names, seed=recipe.seed, **order)
        self.recipe, self.dtype, self.device = recipe, dtype, device
        self.points = min(recipe.points, self._clouds.points)
        if not round(recipe.keep * self.points):
            raise DataError(
                f"--keep {recipe.keep:g}: no point is left of {self.points}. Use a larger --keep or --points."
            )

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``start`` on. Collective: iterate on every rank.

        Parameters
        ----------
        number : int
            The epoch.
        start : int
            First step.

        Yields
        ------
        Batch
            Result of ``placed``, and the labels (N) of all clouds.

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
            yield Batch(samples, (self._prepare_input(self._sparse(voxels)), voxels.labels.to(self.device)))

    def first(self, count: int) -> SparseTensor:
        """Return the first clouds of the first epoch, at most ``count``, as a sparse tensor. Local."""
        return self._sparse(voxel_batch(self._clouds, list(map(int, self.order(0)[:count])), self.recipe, 0))

    def _sparse(self, voxels: VoxelBatch) -> SparseTensor:
        features = voxels.features.to(self.device, self.dtype)
        return SparseTensor(voxels.coords.to(self.device), features, batch_size=len(voxels.labels))
