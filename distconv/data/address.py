"""Samples that are no files of this machine: an address of fsspec, as ``s3://bucket/samples.zarr``.

Each process has filesystems of its own: what is sent to another is the address alone.
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
"""What is read at most behind what was asked for: HDF5 asks for its own notes in small pieces."""

_ADDRESS = re.compile(r"[a-z][\w+.-]*(::[a-z][\w+.-]*)*://", re.IGNORECASE)

_ELSEWHERE = ("reference",)
"""Filesystems whose files name others, anywhere."""

_OWN = ("file", "local")
"""Filesystems of this machine, whose links fsspec follows wherever they lead."""

_ARCHIVES = ("zip", "tar")
"""Filesystems that read one file, the one that is named."""

_STATE = frozenset(
    "etag md5 md5hash content-md5 digest crc generation mtime modified created updated last-modified last_modified "
    "lastmodified".split()
)
"""What filesystems call that by which a change of a file is noticed."""


@dataclass(frozen=True)
class Address:
    """Where samples are, by a URL that fsspec understands; of a chain (``zip://x.h5::s3://...``) the first is read."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Address:
        """What is called so in it."""
        first, *behind = self.url.split("::")
        return Address("::".join([f"{first}{'' if first.endswith('/') else '/'}{name}", *behind]))

    @property
    def suffix(self) -> str:
        """The end of the file's name, as that of a path."""
        return PurePosixPath(self.url.split("::")[0].partition("?")[0]).suffix

    def absolute(self) -> Address:
        """Itself: it is one for every process."""
        return self

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Whatever a filesystem's libraries raise is a DataError.

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
            raise DataError(f"{self} cannot be read: {_described(error)}") from error

    def is_file(self) -> bool:
        """Whether such a file is there.

        Raises
        ------
        DataError
            If that cannot be known.
        """
        with self.reached():
            try:
                return bool(_info(self.url)["type"] == "file")
            except FileNotFoundError:
                return False

    def state(self) -> tuple[int, str]:
        """The size in bytes, and what else changes with the file; of a chain that is the last file's.

        Raises
        ------
        DataError
            If it is not there, or cannot be reached.
        """
        with self.reached():
            size = _info(self.url).get("size")
            last = _info(self.url.rpartition("::")[2])
        marks = sorted(f"{key}={value}" for key, value in last.items() if key.lower() in _STATE)
        return size or 0, f"{last.get('size')} {marks}"

    def open(self) -> io.RawIOBase:
        """The file, open for reading of any part of it, for HDF5.

        Raises
        ------
        DataError
            If it is not there, cannot be reached, or not be read in parts.
        """
        with self.reached():
            filesystem, path = _filesystem(self.url)
            file = filesystem.open(path, "rb", block_size=BLOCK_BYTES, cache_type="readahead")
            file.seek(1)  # fails where a server sends wholes alone
        return _Uncollected(file, filesystem)


Place = Path | Address


class _Uncollected(io.RawIOBase):
    """A file whose reading starts no collection of garbage.

    HDF5 has one lock, which is held while a file object is read. If the filesystem's thread then frees an object of
    HDF5's, it waits for that lock, and who holds it for the thread (h5py's documentation of file-like objects).
    """

    def __init__(self, file: Any, filesystem: object) -> None:
        self._file, self._filesystem = file, filesystem  # an archive is closed with its filesystem

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
        except Exception as error:  # whatever a filesystem's libraries raise, as HDF5 expects it
            raise OSError(_described(error)) from error
        finally:
            if enabled:
                gc.enable()


def place_of(path: str | os.PathLike[str] | Place) -> Place:
    """A path, or an address; one of this machine's own files is a path, which no link in it leads out of.

    Raises
    ------
    DataError
        If what it names would lead elsewhere.
    """
    text = str(path)
    if isinstance(path, Address) or not _ADDRESS.match(text):
        return path if isinstance(path, Address) else Path(path)
    protocols = [each.partition("://")[0].lower() for each in text.split("::")]
    for protocol in protocols:
        if protocol in _ELSEWHERE:
            raise DataError(f"{text}: {protocol} takes files from wherever others have written; give their own address")
    if protocols[-1] not in _OWN:
        return Address(text)
    if len(protocols) == 1:
        return Path(text.partition("://")[2])
    if protocols[0] not in _ARCHIVES:
        raise DataError(f"{text}: {protocols[0]} of files of this machine; give their path")
    return Address(text)


def _described(error: Exception) -> str:
    """An error and its cause: of a connection that is refused fsspec says no more than the address."""
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
    filesystem.invalidate_cache()
    return dict(filesystem.info(path))
