"""An HDF5 file that is open for reading: regular, read from itself alone, and beside whatever else has it open."""

from __future__ import annotations

import contextlib
import importlib
import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from distconv.data.address import Address, Place
from distconv.data.formats.decoding import Decoder, decoded_attributes
from distconv.errors import DataError
from distconv.whole_files import open_regular

SMALL_BYTES = 64 << 20
MOST_COMPRESSED = 100
"""What is larger than both, the first in bytes and the second in what is stored of it, was made to fill memories."""

_MOST_LINKS = 16

_FILTERS = {
    307: "bzip2",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32017: "sz",
    32026: "blosc2",
}
"""Registered filters, for files that do not name them."""

_NO_COORDINATE = "/_nc4_non_coord_"
"""Prefix in netCDF of a variable that has the name of a dimension and is not its coordinate."""

_OTHERS = {
    b"CDF": "a classic netCDF 3 file, which has no chunks. Convert it to netCDF 4: nccopy -k nc4 OLD.nc NEW.nc.",
    b"\x0e\x03\x13\x01": "an HDF4 file, not HDF5. Convert it: h4toh5convert OLD.hdf NEW.h5.",
    b"PK\x03\x04": "a zip archive (.npz, .zip), not HDF5. Unpack it: a folder of .npy files and zarr groups are read.",
    b"\x93NUMPY": "an array of NumPy, not HDF5. Name it alone, or the folder of such files.",
}
"""How files of other formats begin, and what to do with them."""


@dataclass(frozen=True)
class Identity:
    """Which file it is, and its state."""

    device: int
    inode: int
    size: int
    modified: int | str
    """In nanoseconds, or whatever an address has instead."""

    def change(self, now: Identity) -> str:
        """What has become of it, in words."""
        if (self.device, self.inode) != (now.device, now.inode):
            return "replaced by another file"
        if self.size != now.size:
            return f"changed from {self.size} to {now.size} bytes"
        return "written to"


def identity(path: Place) -> Identity:
    """That of the file which ``path`` leads to now."""
    if isinstance(path, Address):
        return Identity(0, 0, *path.state())
    status = path.stat()
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def opened(path: Place) -> tuple[h5py.File, Identity]:
    """The HDF5 file ``path``, open for reading, whoever else has it open and how.

    Raises
    ------
    DataError
        If it is empty, or no HDF5 file.
    """
    if isinstance(path, Address):
        return _opened(path, path.open(), {})
    # The operating system's reasons are clearer than HDF5's, so it is asked first; and HDF5 would wait for a pipe.
    if path.is_dir():
        raise DataError(f"{path} is a directory, not an HDF5 file")
    open_regular(path).close()
    # A driver other than h5py's own: HDF5 refuses a file that it has open already with another way of locking, and the
    # user's way is the user's choice.
    return _opened(path, path, {"driver": "stdio", "locking": False})


def _opened(path: Place, source: object, options: dict[str, Any]) -> tuple[h5py.File, Identity]:
    state = identity(path)
    if state.size == 0:
        raise DataError(f"{path} is empty (0 bytes): it was never written, or its writer has not finished")
    if not isinstance(path, Address) and (other := _other_format(path)):
        raise DataError(f"{path} is {other}")
    try:
        return h5py.File(source, "r", **options), state
    except OSError as error:
        raise DataError(f"{path} cannot be opened as HDF5 ({state.size} bytes): {error}") from error


def _other_format(path: Path) -> str:
    """Return what a file is that begins as one of another format, and what to do; otherwise an empty string."""
    with open_regular(path) as file:
        begin = file.read(8)
    return next((text for mark, text in _OTHERS.items() if begin.startswith(mark)), "")


def own_place(file: h5py.File, name: str) -> str | None:
    """Where in ``file`` the name ends, or None if it is not there. Nothing else is opened on the way.

    Raises
    ------
    DataError
        If a link leads to another file, or links lead nowhere.
    """
    place, parts, hops = "/", name.split("/"), 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        above = file[place]
        if not isinstance(above, h5py.Group) or not above.id.links.exists(part.encode()):
            return None
        kind = above.id.links.get_info(part.encode()).type
        if kind == h5py.h5l.TYPE_HARD:
            place = posixpath.join(place, part)
            continue
        hops += 1
        if kind != h5py.h5l.TYPE_SOFT or hops > _MOST_LINKS:
            raise DataError(f"{name!r} lies in other files; copy it into this one")
        target = above.id.links.get_val(part.encode()).decode()
        place, parts = "/" if target.startswith("/") else place, [*target.split("/"), *parts]
    return place


def values(file: h5py.File, name: str, path: Place, file_bytes: int) -> NDArray[Any]:
    """All of the dataset called ``name``, decoded, if that is not out of all proportion to the file.

    Raises
    ------
    DataError
        As :func:`dataset`, or if its values would take far more memory than they take in the file.
    """
    content = dataset(file, name, path, file_bytes)
    stored = content.id.get_storage_size()
    if content.nbytes > max(SMALL_BYTES, MOST_COMPRESSED * stored):
        raise DataError(
            f"{path}: dataset {name!r} claims {content.nbytes} bytes, for which {stored} are in the file; no data are "
            "so much alike; write it again with less compression"
        )
    try:
        return Decoder(path, name, decoded_attributes(content.attrs)).decode(np.asarray(content[()]))
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{path}: cannot read dataset {name!r}: {error}") from error


def dataset(
    file: h5py.File, name: str, path: Place, file_bytes: int, virtual: Callable[[h5py.Dataset], object] | None = None
) -> h5py.Dataset:
    """The dataset called ``name`` if all of it is in this file, or ``virtual`` has checked where it is.

    Raises
    ------
    DataError
        If it is missing, incomplete, in other files, or none.
    """
    try:
        place = own_place(file, name)
        if place is not None and (variable := own_place(file, _NO_COORDINATE.join(posixpath.split(place)))):
            place = variable
        entry = None if place is None else file[place]
    except DataError as error:
        raise DataError(f"{path}: dataset {error}") from error
    except (KeyError, RuntimeError, ValueError, OSError) as error:
        raise DataError(f"{path}: dataset {name!r} cannot be opened: {error}") from error
    if entry is None:
        has = ", ".join(sorted(file)) or "nothing"
        raise DataError(f"{path}: there is no dataset {name!r} in it; at its top are {has}")
    if not isinstance(entry, h5py.Dataset):
        raise DataError(f"{path}: {name!r} is a group, not a dataset; it has {', '.join(sorted(entry)) or 'nothing'}")
    if (entry.is_virtual and virtual is None) or entry.external or entry.file.filename != file.filename:
        raise DataError(f"{path}: dataset {name!r} lies in other files; copy it into this one")
    try:
        kind = entry.dtype.kind
    except TypeError as error:
        raise DataError(f"{path}: dataset {name!r} has values of a type that NumPy has not: {error}") from error
    if kind == "O" or entry.ndim == 0:
        raise DataError(
            f"{path}: dataset {name!r} is {'ragged' if entry.ndim else 'a single value'}; samples must be equal arrays"
        )
    if virtual is not None and entry.is_virtual:
        virtual(entry)
        return entry
    _check_filters(entry, path, name)
    stored = entry.id.get_storage_size()
    # Chunks that were never written have the fill value: sparse masks have few. Nothing at all was not meant.
    if not stored and entry.size:
        raise DataError(
            f"{path}: dataset {name!r} is incomplete: {entry.shape} takes {entry.nbytes} bytes but 0 were written"
        )
    if stored > file_bytes:
        raise DataError(f"{path}: dataset {name!r} claims {stored} bytes, more than the file's {file_bytes}")
    return entry


def _check_filters(entry: h5py.Dataset, path: Place, name: str) -> None:
    """Raise DataError, naming the filter, unless this process can undo all filters of a dataset.

    Raises
    ------
    DataError
        If one is missing, and hdf5plugin has not it.
    """
    settings = entry.id.get_create_plist()
    for index in range(settings.get_nfilters()):
        number, _, _, label = settings.get_filter(index)
        if not h5py.h5z.filter_avail(number):
            with contextlib.suppress(ImportError):
                importlib.import_module("hdf5plugin")  # makes its filters known to HDF5
        if not h5py.h5z.filter_avail(number):
            known = label.decode(errors="replace").partition(";")[0] or _FILTERS.get(number, "unknown")
            raise DataError(
                f"{path}: dataset {name!r} is stored with the HDF5 filter {known!r} (number {number}), which "
                "is not installed. Install its plugin (most are in the package hdf5plugin), or set HDF5_PLUGIN_PATH."
            )
