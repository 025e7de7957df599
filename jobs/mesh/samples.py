"""A mesh-tangling data set opened for training: its files, channel moments, and loaders."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from mpi4py import MPI

from distconv.data.hdf5 import DatasetLayout
from distconv.data.loader import Loader
from distconv.data.opening import open_source
from distconv.data.source import StoredSource
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs.segmentation.samples import SegmentationGroup, SegmentationSamples

from .dataset import CHANNELS, flip, transpose

LAYOUTS = {
    "input": DatasetLayout("float32", (None, len(CHANNELS), None, None)),
    "label": DatasetLayout("uint8", (None, None, None)),
}
EXTRAPOLATED = {"extrapolated": DatasetLayout("float32", (None, None, None))}


class MeshSamples(SegmentationSamples):
    """Training and held-out samples of one file, and channel moments. Collective: construct on every rank.

    Parameters
    ----------
    path : path-like
        The file.
    comm : MPI.Intracomm
        The ranks that read the samples.
    extrapolated : bool
        If True, the dataset ``extrapolated`` is opened, too; the baselines need it.
    readers : int
        Number of processes that read for each rank.

    Raises
    ------
    DataError
        On all ranks, if the file is invalid. The message contains file, dataset and reason.
    """

    def __init__(
        self, path: str | os.PathLike[str], comm: MPI.Intracomm, *, extrapolated: bool = False, readers: int = 1
    ) -> None:
        layouts = LAYOUTS | (EXTRAPOLATED if extrapolated else {})
        groups = {
            group: SegmentationGroup(_opened(path, group, layouts, comm, readers), f"{group}/input", f"{group}/label")
            for group in ("train", "heldout")
        }
        self.sign_flipped, self.transposed = {axis: flip_signs(axis) for axis in "hw"}, transposed_channels()
        super().__init__(groups, comm, classes=1)
        if extrapolated:
            for name, group in groups.items():
                _check_extents(group, f"{name}/extrapolated", self.size)
        self.positive_fraction = float(self.places[1] / self.places.sum())
        if not 0 < self.positive_fraction < 1:
            raise DataError(
                f"{path}: the fraction of positive training cells is {self.positive_fraction:g}, but both classes "
                "are required. Use other samples."
            )
        self.families = {group: self._families(group) for group in groups}

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the samples, in cells."""
        _, height, width = self.extents
        return height, width

    def file(self, group: str) -> StoredSource:
        """Return the open source of ``train`` or ``heldout``."""
        return self.groups[group].source

    def loader(self, group: str, grid: ProcessGrid, batch: int, *, augment: bool = False, **options: Any) -> Loader:
        """Return a loader of normalized inputs (N, 18, H, W) and labels (N, H, W), both of one dtype.

        Parameters
        ----------
        group, grid, batch
            As in :meth:`distconv.jobs.segmentation.samples.SegmentationSamples.loader`.
        augment : bool
            If True, samples are flipped at random, and transposed at random if they are square.
        **options
            Options of :class:`distconv.data.loader.Loader`. Samples are not shuffled by default.

        Returns
        -------
        Loader
            Batches of two distributed tensors.
        """
        height, width = self.size
        more: dict[str, Any] = {"mirror": "hw" if augment else "", "transpose": augment and height == width}
        return super().loader(group, grid, batch, **more, **options)

    def _families(self, group: str) -> list[str]:
        families = self.file(group).column(f"{group}/family")
        return ["all"] * self.count(group) if families is None else [str(family) for family in families]


def flip_signs(axis: str) -> tuple[float, ...]:
    """Return the factor of each channel when a sample is flipped along ``axis``."""
    # From flip() itself, so that loaders and flip() cannot disagree.
    ones = np.ones((len(CHANNELS), 1, 1), np.float32)
    mirrored, _ = flip(ones, np.zeros((1, 1), np.uint8), axis)
    return tuple(float(value) for value in mirrored[:, 0, 0])


def transposed_channels() -> tuple[tuple[int, float], ...]:
    """Return, for each channel of a transposed sample, its source channel and factor."""
    # Numbered from 1, since 0 has no sign.
    numbers = np.arange(1.0, len(CHANNELS) + 1).reshape(-1, 1, 1)
    turned, _ = transpose(numbers, np.zeros((1, 1)))
    return tuple((round(abs(value)) - 1, math.copysign(1.0, value)) for value in turned[:, 0, 0])


def _opened(
    path: str | os.PathLike[str], group: str, layouts: dict[str, DatasetLayout], comm: MPI.Intracomm, readers: int
) -> StoredSource:
    named = {f"{group}/{name}": layout for name, layout in layouts.items()}
    return open_source(path, named, comm, readers=readers)


def _check_extents(group: SegmentationGroup, name: str, size: tuple[int, int]) -> None:
    extents = group.source.shape(name)[-2:]
    if extents != size:
        raise DataError(
            f"{group.source.path}: the samples of dataset {name!r} have the shape {extents}, but the training "
            f"inputs have {size}. Use samples of the same shape."
        )
