"""Samples that a function of the user's reads, box by box: any file format, or what a simulation computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.formats.store import Computed, unknown
from distconv.distribution import Box, Interval
from distconv.errors import DataError


class BoxFunction:
    """Named datasets of which ``read(name, slices)`` gives any box; a source for :class:`Loader`. Collective.

    ``shapes`` are global, samples first. ``slices`` has one for each dimension; the first is of one sample. The
    function is called in another thread, on each rank for that rank's boxes alone: it makes no MPI calls.

    Raises
    ------
    MismatchError
        If ranks give different shapes.
    """

    readers = 1

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        read: Callable[[str, tuple[slice, ...]], NDArray[np.generic]],
        comm: MPI.Intracomm | None = None,
    ) -> None:
        self.comm = MPI.COMM_WORLD if comm is None else comm
        self.path = Path(getattr(read, "__name__", type(read).__name__))
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.store = Computed(self.path, read)
        check_same_on_all_ranks(self.comm, "BoxFunction", str(sorted(self._shapes.items())))

    def close(self) -> None:
        """Nothing is open."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a dataset, samples first.

        Raises
        ------
        DataError
            If there is no such dataset.
        """
        if name not in self._shapes:
            raise DataError(unknown(name, self.path, self._shapes))
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of what the function returns, which is called for one element. Collective.

        Raises
        ------
        DataError
            On all ranks, if the function fails.
        """
        dtype = try_on_all_ranks(
            self.comm, lambda: self.read(name, tuple(Interval(0, 1) for _ in self.shape(name))).dtype, DataError
        )
        check_same_on_all_ranks(self.comm, f"dtype of {name!r}", str(dtype))
        return dtype

    def chunks(self, name: str) -> tuple[int, ...]:
        """Any element can be had alone."""
        return (1,) * len(self.shape(name))

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """The values in ``box``. Local; may run in another thread.

        Raises
        ------
        DataError
            On this rank, if the function fails or gives another shape.
        """
        return self.store.read(name, tuple(slice(i.start, i.stop) for i in box))

    def check_unchanged(self) -> None:
        """It cannot be known."""

    def warn_of_large_chunks(self, name: str, block: Sequence[int]) -> None:
        """There are no chunks."""
