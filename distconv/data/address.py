"""Locations of samples that are not files of this machine: URLs of fsspec, as ``s3://bucket/samples.zarr``.

``opening`` and the formats call this module; it depends on no format and contains no MPI. A :class:`Url` holds the
string alone, so that it can be sent to another process: each process makes its own filesystem objects.
"""

from __future__ import annotations

import gc
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from distconv.errors import DataError

BLOCK_BYTES = 64 << 10
"""Bytes that are read ahead at most after what was requested: HDF5 reads its metadata in small pieces."""

_URL = re.compile(r"[a-z][\w+.-]*(::[a-z][\w+.-]*)*://", re.IGNORECASE)

_REFERENCE_PROTOCOLS = ("reference",)
"""Filesystems whose files name other files, anywhere."""

_LOCAL_PROTOCOLS = ("file", "local")
"""Filesystems of this machine. fsspec follows their links wherever they lead."""

_ARCHIVE_PROTOCOLS = ("zip", "tar")
"""Filesystems that read one file, which the URL names."""

_VERSION_KEYS = frozenset(
    "etag md5 md5hash content-md5 digest crc generation mtime modified created updated last-modified last_modified "
    "lastmodified".split()
)
"""Names under which filesystems report the version of a file: they differ after each change of it."""


@dataclass(frozen=True)
class Url:
    """A location that fsspec understands, also a chain: ``zip://x.h5::s3://...`` is x.h5 in an archive on s3."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Url:
        """Return the URL of ``name`` in this folder."""
        first, *behind = self.url.split("::")
        return Url("::".join([f"{first}{'' if first.endswith('/') else '/'}{name}", *behind]))

    @property
    def suffix(self) -> str:
        """Suffix of the file's name, as that of a path."""
        return PurePosixPath(self.url.split("::")[0].partition("?")[0]).suffix

    def absolute(self) -> Url:
        """Return this URL, which is the same in every process. Paths have a method of this name, too."""
        return self

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Turn all errors of the filesystem's libraries into DataError.

        Raises
        ------
        DataError
            If they raise anything.
        """
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{self} cannot be read: {_describe_error(error)}") from error

    def is_file(self) -> bool:
        """Return True if there is such a file.

        Raises
        ------
        DataError
            If the filesystem cannot be reached.
        """
        with self.reached():
            try:
                return bool(_info(self.url)["type"] == "file")
            except FileNotFoundError:
                return False

    def state(self) -> tuple[int, str]:
        """Return the size in bytes, and a string that differs after each change of the file.

        For a chain the string describes the last file, the archive, because it contains all others.

        Raises
        ------
        DataError
            If the file does not exist, or the filesystem cannot be reached.
        """
        with self.reached():
            size = _info(self.url).get("size")
            # The version is that of the last file of a chain, such as the archive: files inside of it report none.
            last = _info(self.url.rpartition("::")[2])
        marks = sorted(f"{key}={value}" for key, value in last.items() if key.lower() in _VERSION_KEYS)
        return size or 0, f"{last.get('size')} {marks}"

    def open(self) -> io.RawIOBase:
        """Open the file for reading of any part of it, as HDF5 does.

        Returns
        -------
        io.RawIOBase
            A file object that may be used from several threads.

        Raises
        ------
        DataError
            If the file does not exist, cannot be reached, or cannot be read in parts.
        """
        with self.reached():
            filesystem, path = _filesystem(self.url)
            # HDF5 reads small pieces one after another. Each would be a request of its own without reading ahead.
            file = filesystem.open(path, "rb", block_size=BLOCK_BYTES, cache_type="readahead")
            file.seek(1)  # fails here, and not in HDF5, if the server can only send the full file
        return _GcPausingFile(file, filesystem)


Location = Path | Url


class _GcPausingFile(io.RawIOBase):
    """A file that pauses Python's garbage collector while it is read.

    HDF5 holds its only lock while it reads a file object. If the filesystem's thread collected garbage then and freed
    an object of HDF5, it would wait for that lock, and the lock's owner for the thread: a deadlock (h5py's
    documentation of file-like objects).
    """

    def __init__(self, file: Any, filesystem: object) -> None:
        self._file, self._filesystem = file, filesystem  # an archive is closed when its filesystem is freed

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, into: Any) -> int:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return int(self._file.readinto(into))
        except Exception as error:  # filesystems' libraries raise anything; HDF5 handles OSError
            raise OSError(_describe_error(error)) from error
        finally:
            if enabled:
                gc.enable()


def parse_location(path: str | os.PathLike[str] | Location) -> Location:
    """Return a path for a file of this machine, and a URL for anything else.

    Parameters
    ----------
    path : str, path-like or Url
        A path, or a URL that fsspec understands.

    Returns
    -------
    Path or Url
        ``file://`` and ``local://`` become paths, whose links the readers check.

    Raises
    ------
    DataError
        If fsspec would follow links or references to other files, which cannot be checked.
    """
    text = str(path)
    if isinstance(path, Url) or not _URL.match(text):
        return path if isinstance(path, Url) else Path(path)
    protocols = [each.partition("://")[0].lower() for each in text.split("::")]
    for protocol in protocols:
        if protocol in _REFERENCE_PROTOCOLS:
            raise DataError(f"{text}: {protocol} reads files that its index names, anywhere. Give the URL of the data.")
    if protocols[-1] not in _LOCAL_PROTOCOLS:
        return Url(text)
    if len(protocols) == 1:
        return Path(text.partition("://")[2])
    if protocols[0] not in _ARCHIVE_PROTOCOLS:
        raise DataError(f"{text}: {protocols[0]} of a file of this machine is not supported. Give the file's path.")
    return Url(text)


def _describe_error(error: Exception) -> str:
    """Return an error and its cause: for a refused connection fsspec's own message is only the URL."""
    both = [each for each in (error, error.__cause__) if each is not None]
    return "; ".join(f"{type(each).__name__}: {' '.join(f'{each}'.split())}" for each in both)


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise DataError(f"{url}: {error.name} is not installed: pip install 'distconv[remote]'") from error
    filesystem, path = fsspec.url_to_fs(url)
    return filesystem, path


def _info(url: str) -> dict[str, Any]:
    filesystem, path = _filesystem(url)
    # Filesystems store listings, which would hide a change of the file.
    filesystem.invalidate_cache()
    return dict(filesystem.info(path))
