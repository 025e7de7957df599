"""Point clouds opened for training: files in two formats, and folders of meshes.

Formats of a file: that of ``datafile``; and quantised points, ``q`` whole numbers (N, P, 3) with ``offset`` (N, 3) and
``extent`` (N), where a point is offset + q / 4095 * extent. Both have ``label`` (N), all in the groups ``train`` and
``test``, and the attribute ``class_names``. Every rank opens a file and reads the clouds that it asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks, try_on_rank_0
from distconv.data.hdf5 import DatasetLayout, SampleFile
from distconv.data.opened_file import open_hdf5, resolve_internal_link
from distconv.distribution import Interval
from distconv.errors import DataError

from .clouds import Cloud
from .folders import GROUPS, cached
from .sampling import CACHED_POINTS

STEPS = 4095
"""Quantised points have 12 bits."""


@dataclass(frozen=True)
class CloudLayout(DatasetLayout):
    """A layout that takes every dtype of some kinds; ``dtype`` is what a message calls them."""

    kinds: str = ""

    def describe_mismatch(self, dtype: np.dtype, shape: tuple[int, ...]) -> str:
        """What is wrong with a dataset of this dtype and shape; empty if nothing is."""
        fits = len(shape) == len(self.shape) and all(
            want in (None, have) for want, have in zip(self.shape, shape, strict=True)
        )
        if fits and dtype.kind in self.kinds:
            return ""
        wanted = ", ".join("any" if extent is None else str(extent) for extent in self.shape)
        return f"is {dtype} {shape} but must be {self.dtype} ({wanted})"


def _floats(*shape: int | None) -> DatasetLayout:
    return CloudLayout("floats", shape, kinds="f")


def _whole(*shape: int | None) -> DatasetLayout:
    return CloudLayout("whole numbers", shape, kinds="ui")


OURS = {"points": _floats(None, None, 3), "label": _whole(None)}
PARTS = {"part": _whole(None, None)}
QUANTISED = {"q": _whole(None, None, 3), "offset": _floats(None, 3), "extent": _floats(None), "label": _whole(None)}


class FileClouds:
    """The clouds of one group of a file. Collective to open.

    Raises
    ------
    DataError
        On all ranks, if the file is not what it should be, has no cloud in this group, or a label is no class.
    """

    def __init__(self, path: Path, group: str, datasets: dict[str, DatasetLayout], comm: MPI.Intracomm) -> None:
        self.group = group
        self._file = SampleFile(path, {f"{group}/{name}": layout for name, layout in datasets.items()}, comm)
        try:
            self._quantised = "q" in datasets
            self._has_parts = "part" in datasets
            count, self.points = self._file.shape(f"{group}/{'q' if self._quantised else 'points'}")[:2]
            self._check_extents(count)
            self.labels = try_on_all_ranks(comm, lambda: self._read("label", 0, count).astype(np.int64), DataError)
            self.class_names = self._names("class_names") or tuple(map(str, range(int(self.labels.max()) + 1)))
            self.part_names = self._names("part_names") if self._has_parts else ()
            check_same_on_all_ranks(comm, f"{path} as each rank sees it", f"{self.class_names}, {self.labels.tolist()}")
            self._check_labels()
        except BaseException:
            self._file.close()
            raise

    def __getitem__(self, index: int) -> Cloud:
        """Cloud ``index``. Local; may run in another thread.

        Raises
        ------
        DataError
            On this rank, if it cannot be read, or has points that are nowhere or of no part.
        """
        index = range(len(self.labels))[index]
        if self._quantised:
            scale = self._read("extent", index)[0] / np.float32(STEPS)
            points = self._read("offset", index) + self._read("q", index)[0] * scale
        else:
            points = self._read("points", index)[0]
        if not np.isfinite(points).all():
            wrong = ~np.isfinite(points).all(1)
            raise DataError(
                f"{self._place} cloud {index}: point {wrong.argmax()} lies at {points[wrong.argmax()]} ({wrong.sum()} "
                f"such points of {len(points)}); write the file again without them"
            )
        return Cloud(points.astype(np.float32), int(self.labels[index]), self._part(index))

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the file was replaced or changed since it was opened. Collective."""
        self._file.check_unchanged()

    def close(self) -> None:
        """Close the file on this rank."""
        self._file.close()

    @property
    def _place(self) -> str:
        return f"{self._file.path}, {self.group!r}:"

    def _part(self, index: int) -> NDArray[np.int64] | None:
        if not self._has_parts:
            return None
        part = np.asarray(self._read("part", index)[0], np.int64)
        if not 0 <= part.min() <= part.max() < len(self.part_names):
            raise DataError(
                f"{self._place} cloud {index} has parts from {part.min()} to {part.max()} but the file names "
                f"{len(self.part_names)} in its attribute 'part_names'; name all"
            )
        return part

    def _read(self, name: str, start: int, stop: int | None = None) -> NDArray[np.generic]:
        """Samples ``start`` to ``stop`` of a dataset; one, if nothing is said."""
        name = f"{self.group}/{name}"
        samples = Interval(start, start + 1 if stop is None else stop)
        return self._file.read(name, (samples, *(Interval(0, extent) for extent in self._file.shape(name)[1:])))

    def _names(self, attribute: str) -> tuple[str, ...]:
        names = self._file.attribute(attribute)
        return () if names is None else tuple(str(name) for name in np.ravel(np.asarray(names)))

    def _check_extents(self, count: int) -> None:
        if not count or not self.points:
            raise DataError(f"{self._place} {count} clouds of {self.points} points; give a file that has some")
        parts = self._file.shape(f"{self.group}/part")[1] if self._has_parts else self.points
        if parts != self.points:
            raise DataError(
                f"{self._place} a cloud has {self.points} points but {parts} parts; write the part of each point"
            )

    def _check_labels(self) -> None:
        wrong = (self.labels < 0) | (self.labels >= len(self.class_names))
        if wrong.any():
            first = int(wrong.argmax())
            raise DataError(
                f"{self._place} cloud {first} is of class {self.labels[first]} but there are "
                f"{len(self.class_names)} ({', '.join(self.class_names)}); correct label or class_names"
            )


class PointClouds:
    """The ``train`` and ``test`` clouds of a data set in ``groups``. Collective.

    ``path`` is an HDF5 file, or a folder of OFF meshes, of whose surfaces ``points`` points each are sampled once.

    Raises
    ------
    DataError
        On all ranks, if files are missing or not what they should be; the text names file, reason and numbers.
    MismatchError
        If ranks see different data.
    """

    def __init__(self, path: Path, comm: MPI.Intracomm, *, points: int = CACHED_POINTS) -> None:
        self.path = cached(path, comm, points) if try_on_rank_0(comm, path.is_dir, DataError) else path
        self.groups: dict[str, FileClouds] = {}
        try:
            for group, datasets in try_on_rank_0(comm, lambda: _formats(self.path), DataError).items():
                self.groups[group] = FileClouds(self.path, group, datasets, comm)
        except BaseException:
            self.close()
            raise
        # Without names the labels of a group say how many classes there are: the other may have more.
        self.class_names = max((group.class_names for group in self.groups.values()), key=len)
        self.part_names = self.groups["train"].part_names

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the file was replaced or changed since it was opened. Collective."""
        self.groups["train"].check_unchanged()

    def close(self) -> None:
        """Close the file on this rank."""
        for clouds in self.groups.values():
            clouds.close()


def _formats(path: Path) -> dict[str, dict[str, DatasetLayout]]:
    """The datasets to open in each group. If there are no clouds, opening what is missing will say so."""
    formats: dict[str, dict[str, DatasetLayout]] = {"train": OURS}
    try:
        with open_hdf5(path)[0] as file:
            for group in GROUPS:
                place = resolve_internal_link(file, group)
                there = None if place is None else file[place]
                if isinstance(there, h5py.Group):
                    formats[group] = QUANTISED if "q" in there else OURS | (PARTS if "part" in there else {})
    except OSError:
        pass
    return formats
