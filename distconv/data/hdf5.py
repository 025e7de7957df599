"""HDF5 files of samples: every rank opens them read-only and reads only its own boxes.

Opening is collective and checks all there is to check; whatever only one rank notices (a file that its node cannot see)
becomes the same DataError on all. Reading is local, so that a thread may do it; its errors are agreed by the caller.
A dataset without ``fletcher32`` cannot tell that a bit has flipped.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import agree, together
from distconv.data.opened_file import dataset, identity, opened, own_place
from distconv.distribution import Box
from distconv.errors import DataError


@dataclass(frozen=True)
class Layout:
    """What a dataset must be: its dtype and its extents, None where any will do. The first counts the samples."""

    dtype: str
    shape: tuple[int | None, ...]

    def mismatch(self, dtype: np.dtype, shape: tuple[int, ...]) -> str:
        """What is wrong with a dataset of this dtype and shape; empty if nothing is."""
        fits = len(shape) == len(self.shape) and all(
            want in (None, have) for want, have in zip(self.shape, shape, strict=True)
        )
        if fits and dtype == np.dtype(self.dtype):
            return ""
        wanted = ", ".join("any" if extent is None else str(extent) for extent in self.shape)
        return f"is {dtype} {shape} but must be {self.dtype} ({wanted})"


class SampleFile:
    """Datasets of a file, open for reading; all have the same number of samples. Collective.

    ``layouts`` names them; as a mapping it says what each must be too. ``comm``: by default all ranks of the job.

    Raises
    ------
    DataError
        On all ranks, with path and reason, if on any of them the file is missing, unreadable, incomplete or damaged,
        or a dataset is missing or has another layout.
    MismatchError
        If ranks ask for different files or see different ones.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layouts: Mapping[str, Layout] | Sequence[str],
        comm: MPI.Intracomm | None = None,
    ) -> None:
        self.path = Path(path)
        self.comm = comm = MPI.COMM_WORLD if comm is None else comm
        agree(comm, "HDF5 file", f"{self.path} with {sorted(layouts)}")
        self._file, self._identity = together(comm, lambda: opened(self.path), DataError)
        try:
            self._datasets = together(comm, lambda: self._checked(layouts), DataError)
            agree(comm, f"{self.path} as each rank sees it", f"{self._identity.size} bytes, {self._described()}")
        except BaseException:
            self._file.close()
            raise

    def _checked(self, layouts: Mapping[str, Layout] | Sequence[str]) -> dict[str, h5py.Dataset]:
        found = {name: dataset(self._file, name, self.path, self._identity.size) for name in layouts}
        for name, layout in layouts.items() if isinstance(layouts, Mapping) else ():
            wrong = layout.mismatch(found[name].dtype, found[name].shape)
            if wrong:
                raise DataError(f"{self.path}: dataset {name!r} {wrong}")
        counts = {name: len(dataset) for name, dataset in found.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} in {name!r}" for name, count in counts.items())
            raise DataError(f"{self.path}: the numbers of samples differ: {listed}")
        return found

    def _described(self) -> str:
        return ", ".join(f"{name} {d.dtype} {d.shape}" for name, d in self._datasets.items())

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file on this rank."""
        self._file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a dataset, samples first."""
        return tuple(self._datasets[name].shape)

    def chunks(self, name: str) -> tuple[int, ...]:
        """Extents of a dataset's chunks; one row at a time where it has none."""
        dataset = self._datasets[name]
        return tuple(dataset.chunks or (1,) * (dataset.ndim - 1) + (dataset.shape[-1],))

    def attribute(self, name: str, group: str = "/") -> object:
        """An attribute of the file or of a group, or None."""
        place = own_place(self._file, group)
        return None if place is None else self._file[place].attrs.get(name)

    def column(self, name: str) -> list[object] | None:
        """A small dataset with one value per sample (family, seed, ...), or None if it is not there. Collective."""

        def read() -> list[object] | None:
            place = own_place(self._file, name)
            found = None if place is None else self._file[place]
            if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external or found.ndim != 1:
                return None
            samples = len(next(iter(self._datasets.values())))
            if len(found) > samples:
                raise DataError(
                    f"{self.path}: {name!r} has {len(found)} values for {samples} samples; write one for each"
                )
            return [v.decode() if isinstance(v, bytes) else v for v in found[()].tolist()]

        return together(self.comm, read, DataError)

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """The values in ``box``. Local; may run in another thread.

        Raises
        ------
        DataError
            On this rank, if they cannot be read.
        """
        dataset = self._datasets[name]
        values = np.empty([i.extent for i in box], dataset.dtype)
        if not values.size:
            return values
        try:
            dataset.read_direct(values, tuple(slice(i.start, i.stop) for i in box))
        except (OSError, RuntimeError, ValueError) as error:
            where = ", ".join(f"{i.start}:{i.stop}" for i in box)
            raise DataError(f"{self.path}: cannot read [{where}] of dataset {name!r}: {error}") from error
        return values

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the file was replaced or changed since it was opened. Collective."""

        def check() -> None:
            now = identity(self.path)
            if now != self._identity:
                raise DataError(f"{self.path} has been {self._identity.change(now)} since it was opened; start again")

        together(self.comm, check, DataError)

    def warn_of_large_chunks(self, name: str, block: Sequence[int]) -> None:
        """Warn on rank 0 if chunks are larger than the ``block`` (without the sample dimension) to be read."""
        chunk = self.chunks(name)[1:]
        if self.comm.rank == 0 and math.prod(chunk) > math.prod(block) > 0:
            warnings.warn(
                f"{self.path}: a chunk of {name!r} is {chunk} but a rank reads blocks of {tuple(block)}: "
                f"neighbours read the same chunks; write the file with smaller chunks, or split fewer dimensions",
                stacklevel=3,
            )
