"""Labelled images from the files of MNIST (idx) and CIFAR-10 (binary), plain or compressed, whole in memory.

Formats: Y. LeCun, "The MNIST database", file formats for the idx files; A. Krizhevsky, "The CIFAR-10 dataset", binary
version. Whatever is wrong with a file is a DataError that names it, the numbers, and what to do. Nothing here sends a
message: the caller agrees the errors of the ranks.
"""

from __future__ import annotations

import gzip
import lzma
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distconv.errors import DataError

IDX_IMAGES, IDX_LABELS = 0x803, 0x801
"""Magic numbers: unsigned bytes in 3 dimensions and in 1."""
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + math.prod(CIFAR_SHAPE)
"""Bytes of a record: the label, then the red, green and blue planes."""


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels uint8 (N, C, H, W) and labels int64 (N)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def read_idx(images: Path, labels: Path) -> Images:
    """The images and labels of two idx files.

    Raises
    ------
    DataError
        If there are more of one than of the other.
    """
    pixels, classes = _idx(images, IDX_IMAGES, "images"), _idx(labels, IDX_LABELS, "labels")
    if len(pixels) != len(classes):
        raise DataError(
            f"{images} has {len(pixels)} images but {labels} has {len(classes)} labels; take both from the same set"
        )
    return Images(pixels[:, None], classes.astype(np.int64))


def read_cifar10(paths: Sequence[Path]) -> Images:
    """The records of CIFAR-10 batch files, one file after the other."""
    records = np.concatenate([_cifar_records(path) for path in paths])
    pixels = records[:, 1:].reshape(-1, *CIFAR_SHAPE)
    return Images(pixels, records[:, 0].astype(np.int64))


def _idx(path: Path, magic: int, what: str) -> NDArray[np.uint8]:
    content = _content(path)
    start = 4 * (1 + (magic & 0xFF))  # the magic number's last byte counts the dimensions
    if len(content) < start:
        raise DataError(f"{path}: {len(content)} bytes are no idx file of {what}; fetch it again")
    found, *shape = struct.unpack_from(f">{start // 4}I", content)
    if found != magic:
        raise DataError(
            f"{path}: the magic number is 0x{found:08x} but idx {what} have 0x{magic:08x}; give the right file"
        )
    expected = math.prod(shape)
    if not len(content) - start == expected > 0:
        raise DataError(
            f"{path}: the header says {' x '.join(map(str, shape))} {what}, {expected} bytes, but "
            f"{len(content) - start} follow; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _cifar_records(path: Path) -> NDArray[np.uint8]:
    content = _content(path)
    if len(content) % CIFAR_RECORD or not content:
        raise DataError(
            f"{path}: {len(content)} bytes are no whole number of CIFAR-10 records of {CIFAR_RECORD} bytes "
            f"({len(content) / CIFAR_RECORD:.2f}); fetch it again"
        )
    return np.frombuffer(content, np.uint8).reshape(-1, CIFAR_RECORD)


def _content(path: Path) -> bytes:
    """What is in the file, decompressed as its ending says."""
    stored = path.read_bytes()
    try:
        if path.suffix == ".gz":
            return gzip.decompress(stored)
        return lzma.decompress(stored) if path.suffix == ".xz" else stored
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} ({len(stored)} bytes) is truncated or damaged: {error}; fetch it again") from error
