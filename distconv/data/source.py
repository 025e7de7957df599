"""The interface between a source of samples and its readers: the loader, the statistics and wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.data.address import Location
from distconv.data.coordinates import VariableLabels
from distconv.deprecation import former_names
from distconv.distribution import Box


class SampleSource(Protocol):
    """Named datasets whose first dimension counts samples.

    A source may also have a method ``dtype(name)``, which returns the dtype of what ``read`` returns. A
    :class:`~distconv.data.Field` without a dtype takes its own from it, and is float32 if the source has no such
    method.
    """

    comm: MPI.Intracomm
    readers: int
    """Number of boxes that may be read at a time, each in its own thread."""

    @property
    def path(self) -> Location:
        """Location of the samples, for errors."""

    def close(self) -> None:
        """Close the files on this rank."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dataset, samples first."""

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return the shape of the blocks in which a dataset is stored: reading one element reads such a block."""

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Return the values of a dataset in a box of global indices. Not collective; called in threads.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : Box
            Global indices, samples first.

        Returns
        -------
        ndarray
        """

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the data have changed since they were opened. Collective."""

    def warn_of_large_chunks(self, name: str, block: tuple[int, ...]) -> None:
        """Warn if reading ``block`` (one sample, without the sample dimension) reads much more than that.

        Parameters
        ----------
        name : str
            Name of the dataset.
        block : tuple of int
            Shape that a rank reads, without the sample dimension.
        """


class StoredSource(SampleSource, Protocol):
    """A source that also has attributes and columns; :func:`open_source` returns one."""

    def attribute(self, name: str, group: str = "/") -> object:
        """Return an attribute of the stored file or of a group in it, or None if it is missing.

        Parameters
        ----------
        name : str
            Name of the attribute.
        group : str, optional
            Path of the group (default: the file itself).

        Returns
        -------
        object
        """

    def column(self, name: str) -> list[object] | None:
        """Return a small dataset with one value per sample, or None if it is missing. Collective."""

    @property
    def files(self) -> Sequence[Location]:
        """Location of each file, or group, whose samples follow one another."""

    def labels(self, name: str) -> VariableLabels:
        """Return the dimensions, coordinates and attributes of a dataset. Collective: call on every rank."""


__getattr__ = former_names(__name__, {"Source": "SampleSource"})
