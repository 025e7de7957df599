"""Opening of one HDF5 file for reading, without following links to other files.

The formats, checkpoints and jobs call this module, on one rank at a time: it contains no MPI. Other processes may have
the file open. A file may come from anyone. So every link, filter and size is checked before HDF5 uses it.
"""

from __future__ import annotations

import contextlib
import importlib
import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from distconv.data.address import Location, Url
from distconv.data.formats.decoding import Decoder, decoding_attributes
from distconv.errors import DataError
from distconv.whole_files import open_regular

SMALL_BYTES = 64 << 20
"""Size in bytes up to which a dataset is read whatever its compression."""
MAX_COMPRESSION = 100
"""Larger datasets with a higher ratio of size to stored bytes are rejected: they were made to fill memory."""

_MAX_LINKS = 16

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
"""Names of registered filters, for files that give only a number."""

_NO_COORDINATE = "/_nc4_non_coord_"
"""Prefix in netCDF of a variable that has the name of a dimension and is not its coordinate."""

_OTHER_FORMATS = {
    b"CDF": "a classic netCDF 3 file, which has no chunks. Convert it to netCDF 4: nccopy -k nc4 OLD.nc NEW.nc.",
    b"\x0e\x03\x13\x01": "an HDF4 file, not HDF5. Convert it: h4toh5convert OLD.hdf NEW.h5.",
    b"PK\x03\x04": "a zip archive (.npz, .zip), not HDF5. Unpack it: a folder of .npy files and zarr groups are read.",
    b"\x93NUMPY": "an array of NumPy, not HDF5. Name it alone, or the folder of such files.",
}
"""First bytes of files of other formats, and what to do with such a file."""


@dataclass(frozen=True)
class FileIdentity:
    """Identity and state of a file at one time. Equal objects mean that the file has not changed in between."""

    device: int
    inode: int
    size: int
    modified: int | str
    """Modification time in nanoseconds, or the version string of a URL."""

    def change(self, now: FileIdentity) -> str:
        """Return how the file has changed until ``now``, as a phrase that follows "has been ..."."""
        if (self.device, self.inode) != (now.device, now.inode):
            return "replaced by another file"
        if self.size != now.size:
            return f"changed from {self.size} to {now.size} bytes"
        return "written to"


def file_identity(path: Location) -> FileIdentity:
    """Return the identity of the file that ``path`` leads to now."""
    if isinstance(path, Url):
        return FileIdentity(0, 0, *path.state())
    status = path.stat()
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def open_hdf5(path: Location) -> tuple[h5py.File, FileIdentity]:
    """Open an HDF5 file for reading, even if this process or another one has it open with different locking.

    Parameters
    ----------
    path : Path or Url
        The file.

    Returns
    -------
    h5py.File
        The file. The caller closes it.
    FileIdentity
        Its identity, taken before it was opened.

    Raises
    ------
    DataError
        If the file is empty or not an HDF5 file.
    """
    if isinstance(path, Url):
        return _open_checked(path, path.open(), {})
    # Open by the operating system first: its error messages are clearer than HDF5's. HDF5 would wait for a pipe.
    if path.is_dir():
        raise DataError(f"{path} is a directory, not an HDF5 file")
    open_regular(path).close()
    # A driver other than h5py's own: HDF5 rejects a file that it has already open with different locking, and the
    # user's own code may have opened it with any.
    return _open_checked(path, path, {"driver": "stdio", "locking": False})


def _open_checked(path: Location, source: object, options: dict[str, Any]) -> tuple[h5py.File, FileIdentity]:
    state = file_identity(path)
    if state.size == 0:
        raise DataError(f"{path} is empty (0 bytes): it was never written, or its writer has not finished")
    if not isinstance(path, Url):
        with open_regular(path) as file:
            begin = file.read(8)
        for mark, other in _OTHER_FORMATS.items():
            if begin.startswith(mark):
                raise DataError(f"{path} is {other}")
    try:
        return h5py.File(source, "r", **options), state
    except OSError as error:
        raise DataError(f"{path} cannot be opened as HDF5 ({state.size} bytes): {error}") from error


def resolve_internal_link(file: h5py.File, name: str) -> str | None:
    """Return the path in ``file`` that ``name`` leads to through soft links, without opening any other file.

    Parameters
    ----------
    file : h5py.File
        An open file.
    name : str
        Path of a group or dataset, from the top of the file.

    Returns
    -------
    str or None
        The path of the object itself; None if there is no such object.

    Raises
    ------
    DataError
        If a link leads to another file, or there are too many links in a row.
    """
    place, parts, hops = "/", name.split("/"), 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        above = file[place]
        if not isinstance(above, h5py.Group) or not above.id.links.exists(part.encode()):
            return None
        # Without opening the entry: HDF5 would follow an external link.
        kind = above.id.links.get_info(part.encode()).type
        if kind == h5py.h5l.TYPE_HARD:
            place = posixpath.join(place, part)
            continue
        # A cycle of links would never end.
        hops += 1
        if kind != h5py.h5l.TYPE_SOFT or hops > _MAX_LINKS:
            raise DataError(f"{name!r} lies in other files. Copy it into this one.")
        target = above.id.links.get_val(part.encode()).decode()
        # A relative link starts in its own group; the rest of the path follows after it.
        place, parts = "/" if target.startswith("/") else place, [*target.split("/"), *parts]
    return place


def read_dataset(file: h5py.File, name: str, path: Location, file_bytes: int) -> NDArray[Any]:
    """Return all values of a dataset, decoded, if their size is plausible for the bytes that are stored.

    Parameters
    ----------
    file, name, path, file_bytes
        As in :func:`open_dataset`.

    Returns
    -------
    ndarray
        The decoded values, of the dataset's shape.

    Raises
    ------
    DataError
        As in :func:`open_dataset`, or if the values would take far more memory than the file has bytes for them.
    """
    content = open_dataset(file, name, path, file_bytes)
    stored = content.id.get_storage_size()
    if content.nbytes > max(SMALL_BYTES, MAX_COMPRESSION * stored):
        raise DataError(
            f"{path}: dataset {name!r} claims {content.nbytes} bytes, but {stored} are in the file. "
            "Write it again with less compression."
        )
    try:
        return Decoder(path, name, decoding_attributes(content.attrs)).decode(np.asarray(content[()]))
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{path}: cannot read dataset {name!r}: {error}") from error


def open_dataset(
    file: h5py.File, name: str, path: Location, file_bytes: int, virtual: Callable[[h5py.Dataset], object] | None = None
) -> h5py.Dataset:
    """Return a dataset of which all values are in this file, or whose virtual sources ``virtual`` has checked.

    Parameters
    ----------
    file : h5py.File
        An open file.
    name : str
        Path of the dataset. A netCDF variable that shares its name with a dimension is found, too.
    path : Path or Url
        The file's location, for errors.
    file_bytes : int
        Size of the file. No dataset may claim more.
    virtual : callable, optional
        Called with a virtual dataset to check its sources. Without it virtual datasets are rejected.

    Returns
    -------
    h5py.Dataset
        The dataset, with one dimension at least.

    Raises
    ------
    DataError
        If it is missing, incomplete, not a dataset of equal arrays, or stored in other files.
    """
    try:
        place = resolve_internal_link(file, name)
        # netCDF has stored the variable under this name because the other one is a dimension.
        if place is not None and (variable := resolve_internal_link(file, _NO_COORDINATE.join(posixpath.split(place)))):
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
        raise DataError(f"{path}: dataset {name!r} lies in other files. Copy it into this one.")
    try:
        kind = entry.dtype.kind
    except TypeError as error:
        raise DataError(f"{path}: dataset {name!r} has a type that NumPy does not support: {error}") from error
    if kind == "O" or entry.ndim == 0:
        raise DataError(
            f"{path}: dataset {name!r} is {'ragged' if entry.ndim else 'a single value'}; samples must be equal arrays"
        )
    if virtual is not None and entry.is_virtual:
        virtual(entry)
        return entry
    _check_filters(entry, path, name)
    stored = entry.id.get_storage_size()
    # Single chunks that were never written are allowed, as in sparse masks: they have the fill value. A dataset without
    # any stored byte is that of a writer that did not finish.
    if not stored and entry.size:
        raise DataError(
            f"{path}: dataset {name!r} is incomplete: {entry.shape} takes {entry.nbytes} bytes but 0 were written"
        )
    if stored > file_bytes:
        raise DataError(f"{path}: dataset {name!r} claims {stored} bytes, more than the file's {file_bytes}")
    return entry


def _check_filters(entry: h5py.Dataset, path: Location, name: str) -> None:
    """Check that this process can undo all filters of a dataset.

    Raises
    ------
    DataError
        If a filter, which the error names, is not installed and not part of hdf5plugin.
    """
    settings = entry.id.get_create_plist()
    for index in range(settings.get_nfilters()):
        number, _, _, label = settings.get_filter(index)
        if not h5py.h5z.filter_avail(number):
            with contextlib.suppress(ImportError):
                importlib.import_module("hdf5plugin")  # registers its filters with HDF5
        if not h5py.h5z.filter_avail(number):
            known = label.decode(errors="replace").partition(";")[0] or _FILTERS.get(number, "unknown")
            raise DataError(
                f"{path}: dataset {name!r} is stored with the HDF5 filter {known!r} (number {number}), which "
                "is not installed. Install its plugin (most are in the package hdf5plugin), or set HDF5_PLUGIN_PATH."
            )
