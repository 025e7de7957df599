"""The interface of all formats: datasets by name, boxes of them, and the identity of their files.

A :class:`Store` reads in one process and contains no MPI. It is pickled by path and names, so that another process
opens the files again.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.data.address import Location
from distconv.data.coordinates import Coordinate, VariableLabels
from distconv.data.opened_file import FileIdentity, file_identity
from distconv.errors import DataError

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class StoredDataset:
    """Shape, dtype and chunks of a stored dataset, samples first."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    """Shape of the blocks in which it is stored: reading one element reads such a block."""

    def __post_init__(self) -> None:
        # Values are returned in the byte order of this machine, whatever the file's is.
        object.__setattr__(self, "dtype", self.dtype.newbyteorder("="))


class Store(ABC):
    """Datasets of one location, open for reading in this process. A pickled copy opens them again.

    Parameters
    ----------
    path : Path or Url
        The location.
    names : iterable of str
        The datasets to open.

    Raises
    ------
    DataError
        As :meth:`open`.
    """

    path: Location
    names: tuple[str, ...]

    libraries: Sequence[str] = ()
    """Modules that ``open`` imports; a reading process imports them before it forks its children."""

    def __init__(self, path: Location, names: Iterable[str]) -> None:
        # Some files are opened later, when the working directory may be another.
        self.path, self.names = path.absolute(), tuple(names)
        self.stored: dict[str, StoredDataset] = {}
        self.states: dict[Location, FileIdentity] = {}
        """Identity of each file that the datasets depend on, when it was opened."""
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Open the files and fill ``stored`` and ``states``.

        Raises
        ------
        DataError
            If a dataset is missing, incomplete, damaged, or in a form that may run code.
        """

    @abstractmethod
    def values(self, name: str, box: Slices) -> NDArray[Any]:
        """Return the values of a dataset in a box. :meth:`read` calls it.

        Parameters
        ----------
        name : str
            The dataset.
        box : tuple of slice
            One slice for each dimension, in global indices; not empty.

        Returns
        -------
        ndarray
            The values, in any byte order.

        Raises
        ------
        Exception
            Any error of the format's library, which :meth:`read` turns into a DataError.
        """

    def column(self, name: str) -> list[object] | None:
        """Return a dataset with one value per sample, or None if the file lacks it."""
        return None

    def has(self, name: str) -> bool:
        """Return True if the location has an array of numbers of this name, which may not be open."""
        return name in self.stored

    def dims(self, name: str) -> tuple[str, ...] | None:
        """Return the names of an open dataset's dimensions, or None if they are not stored."""
        return None

    def attributes(self, name: str) -> dict[str, Any]:
        """Return the attributes of an open dataset, without those by which its values are decoded."""
        return {}

    def coordinate(self, name: str) -> Coordinate:
        """Return all values of an open dataset with its attributes.

        Raises
        ------
        DataError
            If they cannot be read.
        """
        values = self.read(name, tuple(slice(0, extent) for extent in self.stored[name].shape))
        return Coordinate(self.dims(name) or (name,), values, self.attributes(name))

    def labels(self, name: str) -> VariableLabels:
        """Return the dimensions of an open dataset, their coordinates, and the dataset's attributes.

        Raises
        ------
        DataError
            If a coordinate cannot be read.
        """
        dims, attributes = self.dims(name), self.attributes(name)
        coordinates = [dim for dim in dims or () if self.has(dim)]
        if not coordinates:
            return VariableLabels(dims, {}, attributes)
        # Another store: the coordinates are not among the datasets that this one has opened.
        stored = type(self)(self.path, coordinates)
        try:
            return VariableLabels(dims, {dim: stored.coordinate(dim) for dim in coordinates}, attributes)
        finally:
            stored.close()

    @property
    def parts(self) -> list[tuple[type[Store], Location]]:
        """Format and location of the files whose samples follow one another; one, unless it is a list of files."""
        return [(type(self), self.path)]

    def attribute(self, name: str, group: str) -> object:
        """Return an attribute of a group, or None if the group lacks it.

        Parameters
        ----------
        name : str
            Name of the attribute.
        group : str
            Path of the group, "/" for the file itself.

        Returns
        -------
        object
        """
        return None

    def close(self) -> None:  # noqa: B027
        """Close the files."""

    def read(self, name: str, box: Slices) -> NDArray[Any]:
        """Return the values of a dataset in a box.

        Parameters
        ----------
        name : str
            The dataset.
        box : tuple of slice
            One slice for each dimension, in global indices, without a step. It may be empty.

        Returns
        -------
        ndarray
            The values in the byte order of this machine.

        Raises
        ------
        DataError
            If they cannot be read.
        """
        shape = tuple(each.stop - each.start for each in box)
        # Formats need not handle empty boxes.
        if 0 in shape:
            return np.empty(shape, self.stored[name].dtype)
        try:
            values = np.asarray(self.values(name, box))
        except DataError:
            raise
        except Exception as error:  # libraries raise anything for damaged data
            text = f"{error}" or type(error).__name__
            raise DataError(f"{self.path}: cannot read [{format_box(box)}] of dataset {name!r}: {text}") from error
        if values.shape != shape:
            raise DataError(f"{self.path}: [{format_box(box)}] of dataset {name!r} has values of {values.shape}")
        # torch rejects values in the other byte order.
        return values.astype(values.dtype.newbyteorder("="), copy=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The files are opened again in this process; handles cannot be pickled.
        self.__dict__ |= state
        self.stored, self.states = {}, {}
        self.open()


@dataclass
class FunctionStore:
    """A function that returns boxes, with the interface of a :class:`Store` for reading processes.

    Reading processes must be able to import the function.
    """

    path: Path
    """Name of the function, for errors."""
    function: Callable[[str, Slices], NDArray[Any]]

    def read(self, name: str, box: Slices) -> NDArray[Any]:
        """Return the values of a dataset in a box.

        Parameters
        ----------
        name, box
            As in :meth:`Store.read`.

        Returns
        -------
        ndarray
            The values.

        Raises
        ------
        DataError
            If the function fails, or returns another shape.
        """
        shape = tuple(each.stop - each.start for each in box)
        try:
            values = np.asarray(self.function(name, box))
        except Exception as error:
            raise DataError(f"{self.path}: {name!r} of [{format_box(box)}]: {type(error).__name__}: {error}") from error
        if values.shape != shape:
            raise DataError(f"{self.path} gives {values.shape} for [{format_box(box)}] of {name!r}")
        return values


def format_box(box: Slices) -> str:
    """Return a box as messages show it, ``0:1, 0:64``."""
    return ", ".join(f"{each.start}:{each.stop}" for each in box)


def file_identities(paths: Iterable[Location]) -> dict[Location, FileIdentity]:
    """Return the identity of each file."""
    return {path: file_identity(path) for path in paths}


def describe_unknown_dataset(name: str, path: object, known: Iterable[str]) -> str:
    """Return the error message for a dataset that a source does not have.

    Parameters
    ----------
    name : str
        The dataset.
    path : object
        Location of the source.
    known : iterable of str
        Datasets that the source has.

    Returns
    -------
    str
        The message, with a suggested fix.
    """
    return (
        f"{path}: dataset {name!r} is not open, but {', '.join(map(repr, known))}. Name one of these, or open it too."
    )


def check_numeric(path: Location, name: str, shape: Sequence[int], dtype: np.dtype) -> None:
    """Check that a dataset is an array of real numbers with a dimension that counts samples.

    Parameters
    ----------
    path, name
        Location and name of the dataset, for the error.
    shape, dtype
        Shape and dtype of its values.

    Raises
    ------
    DataError
        If it is not.
    """
    if dtype.kind not in "biuf" or not len(shape):
        fix = ". Store real and imaginary parts as two channels." if dtype.kind == "c" else ""
        raise DataError(f"{path}: dataset {name!r} is {dtype} {tuple(shape)}; samples must be arrays of numbers{fix}")


def check_inside(path: Path, folder: Path, what: str, *, folders: bool = False) -> None:
    """Check that a path is a regular file that lies in a folder, wherever links lead.

    A file from elsewhere may contain links to any file of this machine. Those of its own folder came with it.

    Parameters
    ----------
    path : Path
        The file.
    folder : Path
        The folder that it must lie in, after all links are resolved.
    what : str
        What refers to the file; the error begins with it.
    folders : bool
        True if ``path`` may be a folder, too. Otherwise it must be a file.

    Raises
    ------
    DataError
        If it is somewhere else, missing, a pipe or a device.
    """
    # Both without links: a folder may be reached through a link itself.
    place = os.path.realpath(path)
    if not Path(place).is_relative_to(os.path.realpath(folder)):
        raise DataError(
            f"{what} leads to {place}, out of the folder {folder}. Copy it into the folder, or name the files in a "
            "list, where links are followed."
        )
    try:
        mode = os.stat(place).st_mode
    except OSError as error:
        raise DataError(f"{what} needs {path}, which cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode) and not (folders and stat.S_ISDIR(mode)):
        raise DataError(f"{what} needs {path}, which is not a regular file but a folder, a pipe or a device")
