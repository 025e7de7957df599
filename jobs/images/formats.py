"""Readers of MNIST (idx) and CIFAR-10 (binary) files, plain or compressed.

Files are read completely into memory. An invalid file raises a DataError with the path, the values and a suggested fix.
The module does not communicate: the caller raises the errors on all ranks.

Source: Y. LeCun, "The MNIST database", file formats (idx); A. Krizhevsky, "The CIFAR-10 dataset", binary version.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from distconv.data.opened_file import MAX_COMPRESSION, SMALL_BYTES
from distconv.errors import DataError
from distconv.whole_files import open_regular

IDX_IMAGES, IDX_LABELS = 0x803, 0x801
"""Magic numbers of unsigned bytes in 3 dimensions and in 1."""
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + math.prod(CIFAR_SHAPE)
"""Bytes of a record, which has the label and then the red, green and blue planes."""


MOST_BYTES = 1 << 30
"""Largest size of the decompressed content, in bytes. Every rank holds all of it."""
_AT_ONCE = 1 << 20
"""Bytes per read of a file."""
_MOST_DICTIONARY = 128 << 20
"""Largest dictionary of an xz file, in bytes. Files of ``xz -9`` need 65 MiB."""


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels uint8 (N, C, H, W) and labels int64 (N)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def read_idx(images: Path, labels: Path) -> Images:
    """Read the images and the labels of two idx files.

    Parameters
    ----------
    images, labels : Path
        The two files, plain or compressed (``.gz``, ``.xz``).

    Returns
    -------
    Images
        With one channel.

    Raises
    ------
    DataError
        If a file is invalid, or the numbers of images and labels differ.
    """
    pixels, classes = _idx(images, IDX_IMAGES, "images"), _idx(labels, IDX_LABELS, "labels")
    if len(pixels) != len(classes):
        raise DataError(
            f"{images}: {len(pixels)} images, but {labels} has {len(classes)} labels. Use files of the same set."
        )
    return Images(pixels[:, None], classes.astype(np.int64))


def read_cifar10(paths: Sequence[Path]) -> Images:
    """Read CIFAR-10 batch files in the given order.

    Parameters
    ----------
    paths : sequence of Path
        The files, plain or compressed (``.gz``, ``.xz``).

    Returns
    -------
    Images
        Images (N, 3, 32, 32).

    Raises
    ------
    DataError
        If a file is invalid.
    """
    records = np.concatenate([_cifar_records(path) for path in paths])
    pixels = records[:, 1:].reshape(-1, *CIFAR_SHAPE)
    return Images(pixels, records[:, 0].astype(np.int64))


def _idx(path: Path, magic: int, what: str) -> NDArray[np.uint8]:
    start = 4 * (1 + (magic & 0xFF))  # the magic number's last byte counts the dimensions
    with _Content(path) as content:
        header = content.read(start)
        if len(header) < start:
            raise DataError(f"{path}: not an idx file of {what} ({len(header)} bytes). Download it again.")
        number, *shape = struct.unpack(f">{start // 4}I", header)
        if number != magic:
            raise DataError(
                f"{path}: the magic number is 0x{number:08x}, but that of idx {what} is 0x{magic:08x}. Give the "
                f"file of {what}."
            )
        expected = math.prod(shape)
        values = content.read(min(expected, content.most) + 1)  # one byte more shows that the file is too long
        if not len(values) == expected > 0:
            more = "more" if len(values) > expected else len(values)
            raise DataError(
                f"{path}: the header announces {' x '.join(map(str, shape))} {what} ({expected} bytes), but "
                f"{more} follow. Download it again."
            )
    return np.frombuffer(values, np.uint8).reshape(shape)


def _cifar_records(path: Path) -> NDArray[np.uint8]:
    with _Content(path) as content:
        records = content.read(content.most + 1)
    if len(records) % CIFAR_RECORD or not records:
        raise DataError(
            f"{path}: not a whole number of CIFAR-10 records of {CIFAR_RECORD} bytes ({len(records)} bytes, "
            f"{len(records) / CIFAR_RECORD:.2f} records). Download it again."
        )
    return np.frombuffer(records, np.uint8).reshape(-1, CIFAR_RECORD)


class _Content:
    """Content of a file, decompressed according to its suffix while it is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_regular(path)
        self._stored = os.fstat(self._file.fileno()).st_size
        packed = path.suffix in (".gz", ".xz")
        self.most = min(MOST_BYTES, max(SMALL_BYTES, MAX_COMPRESSION * self._stored)) if packed else MOST_BYTES
        # The size of a compressed file tells little of its content, which read() checks.
        if not packed:
            self._check(self._stored)
        self._stream: io.BufferedIOBase | IO[bytes] = self._file
        if path.suffix == ".gz":
            self._stream = gzip.GzipFile(fileobj=self._file)
        elif path.suffix == ".xz":
            self._stream = io.BufferedReader(_Xz(self._file))

    def __enter__(self) -> _Content:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, count: int) -> bytearray:
        """Return up to ``count`` more bytes.

        Raises
        ------
        DataError
            If the file is damaged, or its content exceeds ``MOST_BYTES`` or a plausible compression ratio.
        """
        try:
            content = bytearray()
            # In chunks: a single read of everything would take three times the memory.
            while len(content) < count and (piece := self._stream.read(min(_AT_ONCE, count - len(content)))):
                content += piece
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise DataError(
                f"{self._path}: truncated or damaged ({self._stored} bytes): {error}. Download it again."
            ) from error
        self._check(len(content))
        return content

    def _check(self, count: int) -> None:
        if count > self.most:
            self._file.close()
            raise DataError(
                f"{self._path}: too large when decompressed ({self._stored} bytes in the file, more than "
                f"{self.most} decompressed), since each rank would hold all of it. Write an HDF5 file (train.h5), "
                "from which each rank reads its own samples."
            )


class _Xz(io.RawIOBase):
    """An xz file as a stream with a limit on the dictionary, which otherwise could claim any amount of memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._decompressor = file, lzma.LZMADecompressor(memlimit=_MOST_DICTIONARY)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill ``buffer`` with decompressed bytes, and return their number; 0 at the end."""
        view = memoryview(buffer)
        while not self._decompressor.eof:
            given = self._file.read(_AT_ONCE) if self._decompressor.needs_input else b""
            if self._decompressor.needs_input and not given:
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            piece = self._decompressor.decompress(given, len(view))
            if piece:
                view[: len(piece)] = piece
                return len(piece)
        return 0
