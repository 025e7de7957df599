"""What the loader and the moments ask of where samples come from; ``SampleFile`` is a source."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.data.address import Place
from distconv.distribution import Box


class Source(Protocol):
    """Named datasets whose first dimension counts samples.

    A source may have a method ``dtype(name)``, too: the dtype of what ``read`` returns, from which a
    :class:`~distconv.data.Field` without a dtype takes its own. Of a source without it such a field is float32.
    """

    comm: MPI.Intracomm
    readers: int
    """How many boxes may be read at a time, each in a thread of its own."""

    @property
    def path(self) -> Place:
        """Where they are."""

    def close(self) -> None:
        """Let go of the file on this rank."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the dataset ``name``."""

    def chunks(self, name: str) -> tuple[int, ...]:
        """What is read as a whole of the dataset ``name``."""

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """The values of the dataset ``name`` in ``box``. Local."""

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the data are not those that were opened. Collective."""

    def warn_of_large_chunks(self, name: str, block: tuple[int, ...]) -> None:
        """Warn if reading ``block`` of a sample reads much more than that."""


class StoredSource(Source, Protocol):
    """A source that may say more of its samples; what :func:`open_source` opens is one."""

    def attribute(self, name: str, group: str = "/") -> object:
        """An attribute of what is stored, or of a group in it, or None."""

    def column(self, name: str) -> list[object] | None:
        """A small dataset with one value per sample, or None if it is not there. Collective."""
