"""HDF5 and netCDF 4, which is HDF5: one file, or the samples of several files concatenated."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from distconv.data.address import Location, Url
from distconv.data.formats.decoding import Decoder, decoding_attributes
from distconv.data.formats.store import Slices, Store, StoredDataset, check_numeric, file_identities
from distconv.data.formats.virtual import check_virtual_sources
from distconv.data.opened_file import FileIdentity, open_dataset, open_hdf5, resolve_internal_link
from distconv.errors import DataError

_DIMENSION_ATTRIBUTES = (
    "CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS", "_Netcdf4Dimid", "_Netcdf4Coordinates",
    "_NCProperties", "_nc3_strict",
)  # fmt: skip
"""Attributes by which HDF5 and netCDF store dimensions."""

NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable."
"""Beginning of the name that netCDF gives a dimension without coordinates."""

_MAX_OPEN_FILES = 64
"""Files of a list that a process has open at the same time."""


class Hdf5File(Store):
    """Datasets of one HDF5 or netCDF 4 file, and virtual datasets whose sources are in its folder.

    Values are decoded according to the attributes of their dataset (:mod:`.decoding`).
    """

    def open(self) -> None:
        """Open the file and check the datasets.

        Raises
        ------
        DataError
            If the file or a dataset is missing, incomplete or damaged, or if values lie outside the file's folder.
        """
        self._file, state = open_hdf5(self.path)
        self.states, self._datasets = {self.path: state}, dict[str, h5py.Dataset]()
        self._decoders: dict[str, Decoder] = {}
        try:
            for name in self.names:
                self._datasets[name], chunks = self._checked(name, state.size)
                stored = self._datasets[name]
                self._decoders[name] = self._decoder(name, stored)
                dtype = self._decoders[name].dtype(stored.dtype)
                check_numeric(self.path, name, stored.shape, dtype)
                self.stored[name] = StoredDataset(stored.shape, dtype, chunks)
            self.libraries = ("xarray",) if any(each.attributes for each in self._decoders.values()) else ()
        # If the constructor raises, the caller has no object to close.
        except BaseException:
            self._file.close()
            raise

    def _decoder(self, name: str, stored: h5py.Dataset) -> Decoder:
        return Decoder(self.path, name, decoding_attributes(stored.attrs))

    def _checked(self, name: str, size: int) -> tuple[h5py.Dataset, tuple[int, ...]]:
        """Open a complete dataset; return it and the shape of its chunks."""
        sources: dict[Path, tuple[int, ...] | None] = {}
        path = self.path
        if isinstance(path, Url):  # HDF5 would search this machine for the sources of a virtual dataset
            stored = open_dataset(self._file, name, path, size)
        else:
            stored = open_dataset(
                self._file, name, path, size, lambda virtual: sources.update(check_virtual_sources(virtual, path, name))
            )
        self.states |= file_identities(sources)
        _check_records(stored, path, name)
        # The chunks of the first source stand for all: they only determine whether a warning is shown.
        chunks = next(iter(sources.values()), None) if sources else stored.chunks
        # A contiguous dataset counts as chunks of one row.
        chunks = chunks or (1,) * (min(stored.ndim, 2) - 1) + stored.shape[-1:]
        return stored, (1,) * (stored.ndim - len(chunks)) + tuple(chunks)

    def values(self, name: str, box: Slices) -> NDArray[Any]:
        """Return the values of a dataset in ``box``, which is not empty.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : tuple of slice
            One slice for each dimension, in global indices.

        Returns
        -------
        ndarray
        """
        values = np.empty([each.stop - each.start for each in box], self._datasets[name].dtype)
        self._datasets[name].read_direct(values, box)
        return self._decoders[name].decode(values)

    def column(self, name: str) -> list[object] | None:
        """Return a dataset with one value per sample, if there is one in the file itself.

        Raises
        ------
        DataError
            If it has more values than there are samples, or lies in another file.
        """
        place = resolve_internal_link(self._file, name)
        entry = None if place is None else self._file[place]
        if not isinstance(entry, h5py.Dataset) or entry.is_virtual or entry.external or entry.ndim != 1:
            return None
        samples = next(iter(self.stored.values())).shape[0]
        if len(entry) > samples:
            raise DataError(f"{self.path}: {name!r} has {len(entry)} values for {samples} samples. Write one for each.")
        values = entry[()] if entry.dtype.kind == "O" else self._decoder(name, entry).decode(entry[()])
        return [v.decode() if isinstance(v, bytes) else v for v in values.tolist()]

    def has(self, name: str) -> bool:
        """Return True if the file itself has an array of numbers of this name."""
        place = resolve_internal_link(self._file, name)
        entry = None if place is None else self._file[place]
        if not isinstance(entry, h5py.Dataset) or not entry.ndim or entry.dtype.kind not in "biuf":
            return False
        # netCDF stores a dimension without coordinates as a dataset with this name.
        return not _text(entry.attrs.get("NAME", "")).startswith(NO_VARIABLE)

    def dims(self, name: str) -> tuple[str, ...] | None:
        """Return the names of an open dataset's dimensions, or None if one has no dimension scale."""
        stored = self._datasets[name]
        if stored.is_scale:
            return (name.rsplit("/", 1)[-1],) if stored.ndim == 1 else None
        names = [next((scale.name.rsplit("/", 1)[-1] for scale in each.values()), "") for each in stored.dims]
        return tuple(names) if all(names) else None

    def attributes(self, name: str) -> dict[str, Any]:
        """Return the attributes of an open dataset, without those by which its values are decoded."""
        attributes = self._datasets[name].attrs
        left_out = {*_DIMENSION_ATTRIBUTES, *self._decoders[name].attributes}
        plain = {key: _plain(attributes[key]) for key in attributes if key not in left_out}
        return {key: value for key, value in plain.items() if value is not None}

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
        place = resolve_internal_link(self._file, group)
        return None if place is None else self._file[place].attrs.get(name)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _plain(value: Any) -> Any:
    """Return an attribute as a number, a string or a list of numbers; None for anything else."""
    if isinstance(value, bytes | str):
        return _text(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value.reshape(-1).tolist() if value.size > 1 else (value.reshape(-1)[0].item() if value.size else None)
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "biuf" else None


def _check_records(stored: h5py.Dataset, path: Location, name: str) -> None:
    """Check that a netCDF variable is as long as its unlimited dimension.

    Raises
    ------
    DataError
        If it is shorter.
    """
    for axis, limit in enumerate(stored.maxshape):
        for scale in stored.dims[axis].values() if limit is None and "DIMENSION_LIST" in stored.attrs else ():
            users = [stored.file[each[0]].shape[each[1]] for each in scale.attrs.get("REFERENCE_LIST", ())]
            if (longest := max([*scale.shape[:1], *users], default=0)) > stored.shape[axis]:
                raise DataError(
                    f"{path}: dataset {name!r} has {stored.shape[axis]} of the {longest} entries of its unlimited "
                    f"dimension {scale.name!r}; the rest was never written. Write them all."
                )


@dataclass(frozen=True)
class FileMetadata:
    """Format, identity and datasets of one file, or zarr group, of a list. Ranks send it to one another."""

    kind: type[Store]
    path: Location
    states: Mapping[Location, FileIdentity]
    stored: Mapping[str, StoredDataset]


def read_file_metadata(
    path: Location, names: Iterable[str], one_each: bool, kind: type[Store] = Hdf5File
) -> FileMetadata:
    """Read the metadata of one file of a list, and close the file again.

    Parameters
    ----------
    path : Path or Url
        The file.
    names : iterable of str
        The datasets.
    one_each : bool
        True if the file holds one sample, without a dimension that counts samples. Otherwise dimension 0 counts them.
    kind : type of Store
        The file's format.

    Returns
    -------
    FileMetadata
        The metadata, with a sample dimension in any case.

    Raises
    ------
    DataError
        If the file or a dataset is missing, incomplete or damaged.
    """
    file = kind(path, names)
    file.close()
    if isinstance(file, Hdf5File) and len(file.states) > 1:
        raise DataError(f"{path}: virtual datasets are not supported in a list of files. Name the file alone.")
    stored = file.stored
    if one_each:
        stored = {name: StoredDataset((1, *of.shape), of.dtype, (1, *of.chunks)) for name, of in stored.items()}
    return FileMetadata(kind, file.path, file.states, stored)


class ConcatenatedFiles(Store):
    """The samples of several files, or zarr groups, concatenated; at most ``_MAX_OPEN_FILES`` are open.

    It has neither columns nor attributes: :meth:`column` and :meth:`attribute` return None. Each file has its own
    labels.
    """

    def __init__(self, path: Location, names: Iterable[str], heads: Sequence[FileMetadata], one_each: bool) -> None:
        """Concatenate the files whose metadata are ``heads``; ``path`` names all of them in errors."""
        self._heads, self._one_each = tuple(heads), one_each
        super().__init__(path, names)

    def open(self) -> None:
        """Check that the files fit each other, without opening them.

        Raises
        ------
        DataError
            If their samples differ in shape or dtype.
        """
        self._open: OrderedDict[int, Store] = OrderedDict()
        self._lock = threading.Lock()
        self.states = {path: state for head in self._heads for path, state in head.states.items()}
        first = self._heads[0]
        for name in self.names:
            like = first.stored[name]
            for head in self._heads:
                other = head.stored[name]
                if (other.shape[1:], other.dtype) != (like.shape[1:], like.dtype):
                    raise DataError(
                        f"{head.path}: dataset {name!r} has samples of {other.dtype} {other.shape[1:]}, those in "
                        f"{first.path} are {like.dtype} {like.shape[1:]}"
                    )
            count = sum(head.stored[name].shape[0] for head in self._heads)
            self.stored[name] = StoredDataset((count, *like.shape[1:]), like.dtype, like.chunks)
        # The first sample of each file, and the end of the last one.
        self._begins = [0, *itertools.accumulate(self._count(head) for head in self._heads)]

    def _count(self, head: FileMetadata) -> int:
        counts = {name: head.stored[name].shape[0] for name in self.names}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} in {name!r}" for name, count in counts.items())
            raise DataError(f"{head.path}: the numbers of samples differ: {listed}")
        return next(iter(counts.values()))

    def values(self, name: str, box: Slices) -> NDArray[Any]:
        """Return the values of a dataset in ``box``, which is not empty.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : tuple of slice
            One slice for each dimension, in indices of the concatenation.

        Returns
        -------
        ndarray
        """
        values = np.empty([each.stop - each.start for each in box], self.stored[name].dtype)
        start, stop = box[0].start, box[0].stop
        # An empty file begins where the next one does. The last file that begins there has the sample.
        index = bisect.bisect_right(self._begins, start) - 1
        while start < stop:
            begin, end = self._begins[index], min(stop, self._begins[index + 1])
            if start < end:
                inside = () if self._one_each else (slice(start - begin, end - begin),)
                # While it reads: another thread might close this file to open one more.
                with self._lock:
                    part = self._file(index).read(name, (*inside, *box[1:]))
                values[start - box[0].start : end - box[0].start] = part
            start, index = max(start, end), index + 1
        return values

    def _file(self, index: int) -> Store:
        """Return the file with this index, opened if necessary; the caller holds the lock, since several threads read.

        The least recently used file is closed if too many are open.
        """
        if index not in self._open:
            head = self._heads[index]
            file = head.kind(head.path, self.names)
            # The file may have been replaced since its metadata were read.
            for path, then in head.states.items():
                if (now := file.states.get(path)) != then:
                    change = then.change(now) if now else "removed"
                    raise DataError(f"{path} has been {change} since it was opened. Start again.")
            self._open[index] = file
        self._open.move_to_end(index)
        if len(self._open) > _MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return self._open[index]

    @property
    def parts(self) -> list[tuple[type[Store], Location]]:
        """Format and location of each file."""
        return [(head.kind, head.path) for head in self._heads]

    def close(self) -> None:
        """Close all open files."""
        while self._open:
            self._open.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_heads": self._heads, "_one_each": self._one_each}
