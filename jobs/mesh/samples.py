"""A mesh-tangling data set opened for training: its files, its moments, and the fields that a loader reads."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distconv.data.channel_statistics import Moments, moments
from distconv.data.hdf5 import Layout
from distconv.data.loader import Field, Loader
from distconv.data.opening import open_source
from distconv.data.source import StoredSource
from distconv.errors import DataError
from distconv.grid import ProcessGrid

from .dataset import CHANNELS, flip, transpose

LAYOUTS = {
    "input": Layout("float32", (None, len(CHANNELS), None, None)),
    "label": Layout("uint8", (None, None, None)),
}
EXTRAPOLATED = {"extrapolated": Layout("float32", (None, None, None))}


class MeshSamples:
    """Training and held-out samples of one file, and the training samples' moments. Collective.

    Raises
    ------
    DataError
        On all ranks, if the file is not what it should be; the text names file, dataset and reason.
    """

    def __init__(
        self, path: str | os.PathLike[str], comm: MPI.Intracomm, *, extrapolated: bool = False, readers: int = 1
    ) -> None:
        layouts = LAYOUTS | (EXTRAPOLATED if extrapolated else {})
        self.comm = comm
        self.train = _group(path, "train", layouts, comm, readers)
        self.heldout = _group(path, "heldout", layouts, comm, readers)
        for file, group in ((self.train, "train"), (self.heldout, "heldout")):
            _check_extents(file, group, list(layouts), self.size)
        self.input = moments(self.train, "train/input")
        labels = moments(self.train, "train/label", channels=False)
        if labels.high[0] > 1:
            raise DataError(f"{self.train.path}: 'train/label' has values up to {labels.high[0]:g}; labels are 0 or 1")
        self.positive_fraction = float(labels.mean[0])
        if not 0 < self.positive_fraction < 1:
            raise DataError(f"{self.train.path}: the share of positive training cells is {self.positive_fraction:g}")
        self.families = {group: self._families(group) for group in ("train", "heldout")}

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the samples."""
        _, _, height, width = self.train.shape("train/input")
        return height, width

    @property
    def moments(self) -> Moments:
        """Of the training samples' channels."""
        return self.input

    def close(self) -> None:
        """Close the files on this rank."""
        self.train.close()
        self.heldout.close()

    def file(self, group: str) -> StoredSource:
        """The open file that serves ``train`` or ``heldout``."""
        return self.train if group == "train" else self.heldout

    def count(self, group: str) -> int:
        """Number of samples in ``train`` or ``heldout``."""
        return self.file(group).shape(f"{group}/input")[0]

    def loader(
        self,
        group: str,
        grid: ProcessGrid,
        batch: int,
        *,
        augment: bool = False,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Loader:
        """Batches of normalised inputs (N, 18, H, W) and labels (N, H, W), both of ``dtype``.

        ``augment``: samples are mirrored, and transposed where they are squares, at random. Other ``options`` are those
        of a Loader, but they are not shuffled unless asked.
        """
        height, width = self.size
        odd = {axis: signs(axis) for axis in "hw"}
        fields = (
            Field(f"{group}/input", "nchw", dtype, self.input.mean, self.input.std, odd, exchanged()),
            Field(f"{group}/label", "nhw", dtype),
        )
        return Loader(
            self.file(group),
            fields,
            grid,
            batch,
            mirror="hw" if augment else "",
            transpose=augment and height == width,
            **{"shuffle": False, **options},
        )

    def _families(self, group: str) -> list[str]:
        families = self.file(group).column(f"{group}/family")
        return ["all"] * self.count(group) if families is None else [str(family) for family in families]


def signs(axis: str) -> tuple[float, ...]:
    """Factor of each channel when a sample is mirrored along ``axis``."""
    ones = np.ones((len(CHANNELS), 1, 1), np.float32)
    mirrored, _ = flip(ones, np.zeros((1, 1), np.uint8), axis)
    return tuple(float(value) for value in mirrored[:, 0, 0])


def exchanged() -> tuple[tuple[int, float], ...]:
    """For each channel of a transposed sample the channel that it comes from, and its factor."""
    numbers = np.arange(1.0, len(CHANNELS) + 1).reshape(-1, 1, 1)
    turned, _ = transpose(numbers, np.zeros((1, 1)))
    return tuple((round(abs(value)) - 1, math.copysign(1.0, value)) for value in turned[:, 0, 0])


def _group(
    path: str | os.PathLike[str], group: str, layouts: dict[str, Layout], comm: MPI.Intracomm, readers: int
) -> StoredSource:
    named = {f"{group}/{name}": layout for name, layout in layouts.items()}
    return open_source(path, named, comm, readers=readers)


def _check_extents(file: StoredSource, group: str, names: list[str], size: tuple[int, int]) -> None:
    for name in names:
        extents = file.shape(f"{group}/{name}")[-2:]
        if extents != size:
            raise DataError(
                f"{file.path}: dataset {f'{group}/{name}'!r} has samples of {extents}, the training inputs "
                f"are of {size}"
            )
