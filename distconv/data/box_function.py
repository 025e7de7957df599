"""Samples that a function of the user's returns box by box: any file format, or the results of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.formats.store import FunctionStore, describe_unknown_dataset
from distconv.distribution import Box, Interval
from distconv.errors import DataError


class BoxFunction:
    """Named datasets whose values a function returns; a source for :class:`Loader`.

    Collective: construct on every rank.

    Parameters
    ----------
    shapes : mapping of str to sequence of int
        Global shape of each dataset, samples first.
    read : callable
        ``read(name, slices)`` returns an array with the values in ``slices``, one slice for each dimension. The first
        slice has length 1. The function runs in another thread, on each rank for that rank's boxes alone, so it must
        not call MPI.
    comm : MPI.Intracomm, optional
        Ranks that use the source. Default: all ranks of the job.

    Raises
    ------
    MismatchError
        If ranks pass different shapes.
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
        self.store = FunctionStore(self.path, read)
        # Shapes only: functions cannot be compared, and each rank calls its own.
        check_same_on_all_ranks(self.comm, "BoxFunction", str(sorted(self._shapes.items())))

    def close(self) -> None:
        """Do nothing: no file is open."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a dataset, samples first.

        Raises
        ------
        DataError
            If there is no such dataset.
        """
        if name not in self._shapes:
            raise DataError(describe_unknown_dataset(name, self.path, self._shapes))
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of what the function returns, which is called for one element. Collective.

        Raises
        ------
        DataError
            On all ranks, if the function fails.
        """
        # On every rank, since the function may fail, or return another dtype, on one of them.
        dtype = try_on_all_ranks(
            self.comm, lambda: self.read(name, tuple(Interval(0, 1) for _ in self.shape(name))).dtype, DataError
        )
        check_same_on_all_ranks(self.comm, f"dtype of {name!r}", str(dtype))
        return dtype

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return 1 for each dimension: the function can return any element alone."""
        return (1,) * len(self.shape(name))

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Return the values in ``box``. Not collective; may run in another thread.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : Box
            Global indices, samples first.

        Returns
        -------
        ndarray

        Raises
        ------
        DataError
            On this rank, if the function fails or returns another shape.
        """
        return self.store.read(name, tuple(slice(i.start, i.stop) for i in box))

    def check_unchanged(self) -> None:
        """Do nothing: a change of what the function returns cannot be detected."""

    def warn_of_large_chunks(self, name: str, block: Sequence[int]) -> None:
        """Do nothing: there are no chunks.

        Parameters
        ----------
        name : str
            Name of the dataset.
        block : sequence of int
            Shape that a rank reads, without the sample dimension.
        """
