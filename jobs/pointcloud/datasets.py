"""Point clouds opened for training: files in two formats, and folders of meshes.

A file has the groups ``train`` and ``test`` and the attribute ``class_names``. Both formats have ``label`` (N):

- the format of :mod:`.datafile`;
- quantized points: integers ``q`` (N, P, 3) with ``offset`` (N, 3) and ``extent`` (N). A point is
  offset + q / 4095 * extent.

Every rank opens the file and reads the clouds that it requests.
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
from .folders import GROUPS, cached_file
from .sampling import CACHED_POINTS

STEPS = 4095
"""Largest quantized coordinate, of 12 bits."""


@dataclass(frozen=True)
class CloudLayout(DatasetLayout):
    """Dataset layout that accepts every dtype of the given ``kinds``; ``dtype`` is their description in messages."""

    kinds: str = ""

    def describe_mismatch(self, dtype: np.dtype, shape: tuple[int, ...]) -> str:
        """Return the difference between a dataset and this layout as a phrase for a message.

        Parameters
        ----------
        dtype : dtype
            Data type of the dataset.
        shape : tuple of int
            Shape of the dataset.

        Returns
        -------
        str
            The phrase; empty if the dataset fits.
        """
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


# Datasets of the format of ``datafile``, those that it has if parts are known, and those of quantized points.
OURS = {"points": _floats(None, None, 3), "label": _whole(None)}
PARTS = {"part": _whole(None, None)}
QUANTISED = {"q": _whole(None, None, 3), "offset": _floats(None, 3), "extent": _floats(None), "label": _whole(None)}


class FileClouds:
    """The clouds of one group of a file. Collective: construct on every rank.

    Parameters
    ----------
    path : Path
        The file.
    group : str
        ``train`` or ``test``.
    datasets : dict of str to DatasetLayout
        The datasets to open; they determine the format.
    comm : MPI.Intracomm
        The ranks that open the file.

    Raises
    ------
    DataError
        On all ranks, if the file is invalid, the group has no clouds, or a label is not a valid class.
    MismatchError
        If ranks read different labels or class names.
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
        """Return cloud ``index``. Local; may be called from another thread.

        Raises
        ------
        DataError
            On this rank, if the cloud cannot be read, a coordinate is not finite, or a part has no name.
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
                f"{self._place} cloud {index}: point {wrong.argmax()} is not finite ({points[wrong.argmax()]}; "
                f"{wrong.sum()} such points of {len(points)}). Write the file again without them."
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
                f"{self._place} cloud {index}: its parts are {part.min()} to {part.max()}, but the attribute "
                f"'part_names' has {len(self.part_names)} names. Name all parts."
            )
        return part

    def _read(self, name: str, start: int, stop: int | None = None) -> NDArray[np.generic]:
        """Read samples ``start`` to ``stop`` of a dataset; by default one sample."""
        name = f"{self.group}/{name}"
        samples = Interval(start, start + 1 if stop is None else stop)
        return self._file.read(name, (samples, *(Interval(0, extent) for extent in self._file.shape(name)[1:])))

    def _names(self, attribute: str) -> tuple[str, ...]:
        names = self._file.attribute(attribute)
        return () if names is None else tuple(str(name) for name in np.ravel(np.asarray(names)))

    def _check_extents(self, count: int) -> None:
        if not count or not self.points:
            raise DataError(
                f"{self._place} {count} clouds of {self.points} points. Use a file with at least one cloud and "
                "one point."
            )
        parts = self._file.shape(f"{self.group}/part")[1] if self._has_parts else self.points
        if parts != self.points:
            raise DataError(
                f"{self._place} a cloud has {self.points} points but {parts} part labels. Write the part of each point."
            )

    def _check_labels(self) -> None:
        wrong = (self.labels < 0) | (self.labels >= len(self.class_names))
        if wrong.any():
            first = int(wrong.argmax())
            raise DataError(
                f"{self._place} cloud {first}: its class is {self.labels[first]}, but there are "
                f"{len(self.class_names)} classes ({', '.join(self.class_names)}). Correct the label or "
                "class_names."
            )


class PointClouds:
    """The training and test clouds of a data set, in ``groups``. Collective: construct on every rank.

    Parameters
    ----------
    path : Path
        An HDF5 file, or a folder of meshes and point files, which are sampled once.
    comm : MPI.Intracomm
        The ranks that open the data set.
    points : int
        Number of points to sample from each file of a folder.

    Raises
    ------
    DataError
        On all ranks, if files are missing or invalid. The message contains file, reason and values.
    MismatchError
        If ranks read different data.
    """

    def __init__(self, path: Path, comm: MPI.Intracomm, *, points: int = CACHED_POINTS) -> None:
        self.path = cached_file(path, comm, points) if try_on_rank_0(comm, path.is_dir, DataError) else path
        self.groups: dict[str, FileClouds] = {}
        try:
            for group, datasets in try_on_rank_0(comm, lambda: _formats(self.path), DataError).items():
                self.groups[group] = FileClouds(self.path, group, datasets, comm)
        except BaseException:
            self.close()
            raise
        # Without the attribute, a group has as many classes as its labels show; the other group may have more.
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
    """Return the datasets to open in each group. A missing file or group raises only when it is opened."""
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
