"""Datasets of samples in files: every rank opens them read-only and reads only its own boxes.

Opening is collective and makes all checks. An error that only one rank notices, such as a file that its node cannot
see, is raised on all. Reading is not collective, so that a thread may do it; the caller must agree on its errors. A
dataset of HDF5 without ``fletcher32`` cannot detect a flipped bit.
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
from distconv.data.address import Location, parse_location
from distconv.data.coordinates import VariableLabels, join_labels
from distconv.data.formats.hdf5_files import Hdf5File
from distconv.data.formats.store import Store, StoredDataset, describe_unknown_dataset
from distconv.data.opened_file import FileIdentity, file_identity
from distconv.data.source import SampleSource
from distconv.distribution import Box, block_range
from distconv.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class DatasetLayout:
    """Requirements on a dataset: its dtype and its shape. The first dimension counts samples."""

    dtype: str
    """Name of the dtype, as NumPy writes it."""
    shape: tuple[int | None, ...]
    """Size of each dimension; None where any size will do."""

    def describe_mismatch(self, dtype: np.dtype, shape: tuple[int, ...]) -> str:
        """Return how a dataset of this dtype and shape differs from the layout; "" if it fits.

        Parameters
        ----------
        dtype : numpy.dtype
            Dtype of the dataset.
        shape : tuple of int
            Shape of the dataset, samples first.

        Returns
        -------
        str
        """
        fits = len(shape) == len(self.shape) and all(
            want in (None, have) for want, have in zip(self.shape, shape, strict=True)
        )
        if fits and dtype == np.dtype(self.dtype):
            return ""
        wanted = ", ".join("any" if extent is None else str(extent) for extent in self.shape)
        return f"is {dtype} {shape} but must be {self.dtype} ({wanted})"


class SampleDataset:
    """Datasets of a store, open for reading; all have the same number of samples.

    Collective: construct on every rank.

    Parameters
    ----------
    path : str, path-like or Url
        Location of the samples, for errors.
    layouts : mapping of str to DatasetLayout, or sequence of str
        Names of the datasets; a mapping also gives the requirements on each.
    comm : MPI.Intracomm, optional
        Ranks that use the datasets. Default: all ranks of the job.
    open_store : callable
        Returns a :class:`Store` of the datasets with the names that it is given.
    """

    kind = "samples"
    """Name of the kind of source in errors."""
    readers = 1
    """Number of boxes that may be read at a time."""

    def __init__(
        self,
        path: str | os.PathLike[str] | Location,
        layouts: Mapping[str, DatasetLayout] | Sequence[str],
        comm: MPI.Intracomm | None,
        open_store: Callable[[list[str]], Store],
    ) -> None:
        self.comm = comm = MPI.COMM_WORLD if comm is None else comm
        layouts = [layouts] if isinstance(layouts, str) else layouts
        # Each step ends on all ranks before the next one begins, so a rank that fails leaves no other one waiting.
        check_same_on_all_ranks(comm, self.kind, f"{path} with {sorted(layouts)}")
        self.path = try_on_all_ranks(comm, lambda: parse_location(path), DataError)
        self.store = try_on_all_ranks(comm, lambda: open_store(list(layouts)), DataError)
        try:
            try_on_all_ranks(comm, lambda: self._check(layouts), DataError)
            total = sum(state.size for state in self.store.states.values())
            stored = ", ".join(f"{name} {d.dtype} {d.shape}" for name, d in self.store.stored.items())
            check_same_on_all_ranks(comm, f"{self.path} as each rank sees it", f"{total} bytes, {stored}")
        except BaseException:
            self.store.close()
            raise

    def _check(self, layouts: Mapping[str, DatasetLayout] | Sequence[str]) -> None:
        stored = self.store.stored
        for name, layout in layouts.items() if isinstance(layouts, Mapping) else ():
            wrong = layout.describe_mismatch(stored[name].dtype, stored[name].shape)
            if wrong:
                raise DataError(f"{self.path}: dataset {name!r} {wrong}")
        counts = {name: of.shape[0] for name, of in stored.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} in {name!r}" for name, count in counts.items())
            raise DataError(f"{self.path}: the numbers of samples differ: {listed}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files on this rank."""
        self.store.close()

    def _stored(self, name: str) -> StoredDataset:
        if name not in self.store.stored:
            raise DataError(describe_unknown_dataset(name, self.path, self.store.stored))
        return self.store.stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a dataset, samples first."""
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a dataset's values as :meth:`read` returns them."""
        return self._stored(name).dtype

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dataset's chunks; that of one row if it has none."""
        return self._stored(name).chunks

    @property
    def files(self) -> Sequence[Location]:
        """Location of each file, or group, whose samples follow one another."""
        return [path for _, path in self.store.parts]

    def labels(self, name: str) -> VariableLabels:
        """Return the names of a dataset's dimensions, their coordinates, and the dataset's attributes.

        Collective: call on every rank. Of a list of files, labels that are not the same in all of them are left out,
        except for coordinates of the samples and affine matrices, which are joined.

        Parameters
        ----------
        name : str
            Name of the dataset.

        Returns
        -------
        VariableLabels
            Without dimensions if they have no names.
        """
        # Each rank reads consecutive files, and joins their labels, so that messages are small.
        parts = self.store.parts
        mine = block_range(len(parts), self.comm.size, self.comm.rank)

        def read() -> list[VariableLabels]:
            found = [self._labels_of(*parts[index], name) for index in mine]
            return [join_labels(self.path, found)] if found else []

        of_ranks = self.comm.allgather(try_on_all_ranks(self.comm, read, DataError))
        return join_labels(self.path, [each for found in of_ranks for each in found])

    def _labels_of(self, kind: type[Store], path: Location, name: str) -> VariableLabels:
        """Return the labels of a dataset in one file, with a dimension for samples."""
        store = kind(path, [name])
        try:
            found = store.labels(name)
            if found.dims is None or len(found.dims) == len(self.shape(name)):
                return found
            # Each file of the list holds one sample, without a dimension for samples.
            sample = "sample" if "sample" not in found.dims else "file"
            return VariableLabels((sample, *found.dims), found.coords, found.attributes)
        finally:
            store.close()

    def attribute(self, name: str, group: str = "/") -> object:
        """Return an attribute of the file or of a group, or None if it is missing.

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
        return self.store.attribute(name, group)

    def column(self, name: str) -> list[object] | None:
        """Return a small dataset with one value per sample (such as family), or None if it is missing. Collective."""
        return try_on_all_ranks(self.comm, lambda: self.store.column(name), DataError)

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
            On this rank, if they cannot be read.
        """
        # Raises for a dataset that is not open.
        self._stored(name)
        return self.store.read(name, tuple(slice(i.start, i.stop) for i in box))

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if a file was replaced or changed since it was opened. Collective."""
        check_files_unchanged(self.comm, self.store.states)

    def warn_of_large_chunks(self, name: str, block: Sequence[int]) -> None:
        """Warn on rank 0 if chunks are larger than the ``block`` (without the sample dimension) that a rank reads.

        Parameters
        ----------
        name : str
            Name of the dataset.
        block : sequence of int
            Shape that a rank reads, without the sample dimension.
        """
        warn_of_chunks(self, name, block)


def check_files_unchanged(comm: MPI.Intracomm, states: Mapping[Location, FileIdentity]) -> None:
    """Check that files have not changed. Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        Ranks that use the files.
    states : mapping
        Identity of each file when it was opened.

    Raises
    ------
    DataError
        On all ranks, if one was replaced or changed.
    """

    def check() -> None:
        # Each rank checks some of the files: a list may have thousands.
        for path, then in list(states.items())[comm.rank :: comm.size]:
            now = file_identity(path)
            if now != then:
                raise DataError(f"{path} has been {then.change(now)} since it was opened. Start again.")

    try_on_all_ranks(comm, check, DataError)


def warn_of_chunks(source: SampleSource, name: str, block: Sequence[int]) -> None:
    """Warn on rank 0 if chunks are larger than what a rank reads.

    Parameters
    ----------
    source : SampleSource
        Source of the samples.
    name : str
        Name of the dataset.
    block : sequence of int
        Shape that a rank reads, without the sample dimension.
    """
    chunk = source.chunks(name)[1:]
    # Rank 0 has the largest block. A rank without one reads no chunk.
    if source.comm.rank == 0 and math.prod(chunk) > math.prod(block) > 0:
        warnings.warn(
            f"{source.path}: a chunk of {name!r} is {chunk} but a rank reads blocks of {tuple(block)}: "
            f"neighbours read the same chunks; write the file with smaller chunks, or split fewer dimensions",
            stacklevel=4,
        )


class SampleFile(SampleDataset):
    """Datasets of one HDF5 file, open for reading; all have the same number of samples.

    Collective: construct on every rank.

    Parameters
    ----------
    path : str, path-like or Url
        The file.
    layouts : mapping of str to DatasetLayout, or sequence of str
        Names of the datasets; a mapping also gives the requirements on each.
    comm : MPI.Intracomm, optional
        Ranks that use the file. Default: all ranks of the job.

    Raises
    ------
    DataError
        On all ranks, with path and reason, if on any of them the file is missing, unreadable, incomplete or damaged,
        or a dataset is missing or does not fit its layout.
    MismatchError
        If ranks pass different files or see different ones.
    """

    kind = "HDF5 file"

    def __init__(
        self,
        path: str | os.PathLike[str] | Location,
        layouts: Mapping[str, DatasetLayout] | Sequence[str],
        comm: MPI.Intracomm | None = None,
    ) -> None:
        super().__init__(path, layouts, comm, lambda names: Hdf5File(parse_location(path), names))
