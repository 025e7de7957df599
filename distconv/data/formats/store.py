"""What all formats have in common: datasets by name, boxes of them, the state of their files."""

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

from distconv.data.address import Place
from distconv.data.opened_file import Identity, identity
from distconv.errors import DataError

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Stored:
    """A dataset as it is stored, samples first."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    """What is read as a whole."""

    def __post_init__(self) -> None:
        # Values are read in the byte order of this machine, whatever that in the file.
        object.__setattr__(self, "dtype", self.dtype.newbyteorder("="))


class Store(ABC):
    """Datasets of a path, open for reading in this process. A copy in another process opens them there."""

    path: Place
    names: tuple[str, ...]

    libraries: Sequence[str] = ()
    """What ``open`` imports."""

    def __init__(self, path: Place, names: Iterable[str]) -> None:
        # Files may be opened later, when the process is in another folder.
        self.path, self.names = path.absolute(), tuple(names)
        self.stored: dict[str, Stored] = {}
        self.states: dict[Place, Identity] = {}
        """The files whose change would be one of the data, as they were when they were opened."""
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Open what is there and fill ``stored``.

        Raises
        ------
        DataError
            If a dataset is missing, incomplete or damaged, or cannot be trusted.
        """

    @abstractmethod
    def values(self, name: str, box: Slices) -> NDArray[Any]:
        """The values of a dataset in ``box``, which is not empty; what goes wrong is the library's own error."""

    def column(self, name: str) -> list[object] | None:
        """A dataset with one value per sample, if there is one."""
        return None

    def attribute(self, name: str, group: str) -> object:
        """An attribute of a group, or None."""
        return None

    def close(self) -> None:  # noqa: B027
        """Let go of what is open."""

    def read(self, name: str, box: Slices) -> NDArray[Any]:
        """The values of a dataset in ``box``.

        Raises
        ------
        DataError
            If they cannot be read.
        """
        shape = tuple(each.stop - each.start for each in box)
        if 0 in shape:
            return np.empty(shape, self.stored[name].dtype)
        try:
            values = np.asarray(self.values(name, box))
        except DataError:
            raise
        except Exception as error:  # whatever a library raises at damaged data
            text = f"{error}" or type(error).__name__
            raise DataError(f"{self.path}: cannot read [{written(box)}] of dataset {name!r}: {text}") from error
        if values.shape != shape:
            raise DataError(f"{self.path}: [{written(box)}] of dataset {name!r} has values of {values.shape}")
        return values.astype(values.dtype.newbyteorder("="), copy=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.stored, self.states = {}, {}
        self.open()


@dataclass
class Computed:
    """A function that computes boxes, for another process; it must be one that can be imported there."""

    path: Path
    function: Callable[[str, Slices], NDArray[Any]]

    def read(self, name: str, box: Slices) -> NDArray[Any]:
        """The values of a dataset in ``box``.

        Raises
        ------
        DataError
            If the function fails, or gives another shape.
        """
        shape = tuple(each.stop - each.start for each in box)
        try:
            values = np.asarray(self.function(name, box))
        except Exception as error:
            raise DataError(f"{self.path}: {name!r} of [{written(box)}]: {type(error).__name__}: {error}") from error
        if values.shape != shape:
            raise DataError(f"{self.path} gives {values.shape} for [{written(box)}] of {name!r}")
        return values


def written(box: Slices) -> str:
    """A box as a message shows it."""
    return ", ".join(f"{each.start}:{each.stop}" for each in box)


def states_of(paths: Iterable[Place]) -> dict[Place, Identity]:
    """The state of each of these files."""
    return {path: identity(path) for path in paths}


def unknown(name: str, path: object, known: Iterable[str]) -> str:
    """Return the error for a dataset that a source does not have."""
    return (
        f"{path}: dataset {name!r} is not open, but {', '.join(map(repr, known))}. Name one of these, or open it too."
    )


def check_numbers(path: Place, name: str, shape: Sequence[int], dtype: np.dtype) -> None:
    """Raise DataError unless a dataset is an array of numbers with a dimension that counts samples.

    Raises
    ------
    DataError
        If it is none.
    """
    if dtype.kind not in "biuf" or not len(shape):
        way_out = ". Store real and imaginary parts as two channels." if dtype.kind == "c" else ""
        raise DataError(
            f"{path}: dataset {name!r} is {dtype} {tuple(shape)}; samples must be arrays of numbers{way_out}"
        )


def check_inside(path: Path, folder: Path, what: str, *, folders: bool = False) -> None:
    """Raise DataError unless ``path`` is a regular file, and lies in ``folder`` whatever links lead to.

    ``folders``: it may be a folder, too.

    Raises
    ------
    DataError
        If it is somewhere else, missing, a pipe or a device.
    """
    place = os.path.realpath(path)
    if not Path(place).is_relative_to(os.path.realpath(folder)):
        raise DataError(
            f"{what} leads to {place}, out of the folder {folder}; copy it into that, or name the files in a "
            "list, where links are followed"
        )
    try:
        mode = os.stat(place).st_mode
    except OSError as error:
        raise DataError(f"{what} needs {path}, which cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode) and not (folders and stat.S_ISDIR(mode)):
        raise DataError(f"{what} needs {path}, which is not a regular file but a folder, a pipe or a device")
