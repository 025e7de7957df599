"""Files of samples: every rank opens them read-only and reads only its own boxes.

Opening is collective and checks all there is to check; whatever only one rank notices (a file that its node cannot see)
becomes the same DataError on all. Reading is local, so that a thread may do it; its errors are agreed by the caller.
A dataset of HDF5 without ``fletcher32`` cannot tell that a bit has flipped.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.address import Place, place_of
from distconv.data.formats.hdf5_files import Hdf5File
from distconv.data.formats.store import Store, Stored, unknown
from distconv.data.opened_file import identity
from distconv.distribution import Box
from distconv.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Self


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


class StoredSamples:
    """Datasets of a store, open for reading; all have the same number of samples. Collective.

    ``layouts`` names them; as a mapping it says what each must be too. ``open_store`` opens a store of those names.
    """

    kind = "samples"
    readers = 1
    """How many boxes are read at a time."""

    def __init__(
        self,
        path: str | os.PathLike[str] | Place,
        layouts: Mapping[str, Layout] | Sequence[str],
        comm: MPI.Intracomm | None,
        open_store: Callable[[list[str]], Store],
    ) -> None:
        self.comm = comm = MPI.COMM_WORLD if comm is None else comm
        layouts = [layouts] if isinstance(layouts, str) else layouts
        check_same_on_all_ranks(comm, self.kind, f"{path} with {sorted(layouts)}")
        self.path = try_on_all_ranks(comm, lambda: place_of(path), DataError)
        self.store = try_on_all_ranks(comm, lambda: open_store(list(layouts)), DataError)
        try:
            try_on_all_ranks(comm, lambda: self._check(layouts), DataError)
            check_same_on_all_ranks(comm, f"{self.path} as each rank sees it", self._described())
        except BaseException:
            self.store.close()
            raise

    def _check(self, layouts: Mapping[str, Layout] | Sequence[str]) -> None:
        stored = self.store.stored
        for name, layout in layouts.items() if isinstance(layouts, Mapping) else ():
            wrong = layout.mismatch(stored[name].dtype, stored[name].shape)
            if wrong:
                raise DataError(f"{self.path}: dataset {name!r} {wrong}")
        counts = {name: of.shape[0] for name, of in stored.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} in {name!r}" for name, count in counts.items())
            raise DataError(f"{self.path}: the numbers of samples differ: {listed}")

    def _described(self) -> str:
        total = sum(state.size for state in self.store.states.values())
        return f"{total} bytes, " + ", ".join(f"{name} {d.dtype} {d.shape}" for name, d in self.store.stored.items())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files on this rank."""
        self.store.close()

    def _stored(self, name: str) -> Stored:
        if name not in self.store.stored:
            raise DataError(unknown(name, self.path, self.store.stored))
        return self.store.stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a dataset, samples first."""
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a dataset's values as :meth:`read` returns them."""
        return self._stored(name).dtype

    def chunks(self, name: str) -> tuple[int, ...]:
        """Extents of a dataset's chunks; one row at a time where it has none."""
        return self._stored(name).chunks

    def attribute(self, name: str, group: str = "/") -> object:
        """An attribute of the file or of a group, or None."""
        return self.store.attribute(name, group)

    def column(self, name: str) -> list[object] | None:
        """A small dataset with one value per sample (family, seed, ...), or None if it is not there. Collective."""
        return try_on_all_ranks(self.comm, lambda: self.store.column(name), DataError)

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """The values in ``box``. Local; may run in another thread.

        Raises
        ------
        DataError
            On this rank, if they cannot be read.
        """
        self._stored(name)
        return self.store.read(name, tuple(slice(i.start, i.stop) for i in box))

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if a file was replaced or changed since it was opened. Collective."""

        def check() -> None:
            # The ranks share the looking: of a list there may be thousands.
            for path, then in list(self.store.states.items())[self.comm.rank :: self.comm.size]:
                now = identity(path)
                if now != then:
                    raise DataError(f"{path} has been {then.change(now)} since it was opened; start again")

        try_on_all_ranks(self.comm, check, DataError)

    def warn_of_large_chunks(self, name: str, block: Sequence[int]) -> None:
        """Warn on rank 0 if chunks are larger than the ``block`` (without the sample dimension) to be read."""
        chunk = self.chunks(name)[1:]
        if self.comm.rank == 0 and math.prod(chunk) > math.prod(block) > 0:
            warnings.warn(
                f"{self.path}: a chunk of {name!r} is {chunk} but a rank reads blocks of {tuple(block)}: "
                f"neighbours read the same chunks; write the file with smaller chunks, or split fewer dimensions",
                stacklevel=3,
            )


class SampleFile(StoredSamples):
    """Datasets of an HDF5 file, open for reading; all have the same number of samples. Collective.

    ``layouts`` names them; as a mapping it says what each must be too. ``comm``: by default all ranks of the job.

    Raises
    ------
    DataError
        On all ranks, with path and reason, if on any of them the file is missing, unreadable, incomplete or damaged,
        or a dataset is missing or has another layout.
    MismatchError
        If ranks ask for different files or see different ones.
    """

    kind = "HDF5 file"

    def __init__(
        self,
        path: str | os.PathLike[str] | Place,
        layouts: Mapping[str, Layout] | Sequence[str],
        comm: MPI.Intracomm | None = None,
    ) -> None:
        super().__init__(path, layouts, comm, lambda names: Hdf5File(place_of(path), names))
