"""Small files of labelled images in all formats that ``distconv train classify`` reads, for its tests."""

from __future__ import annotations

import gzip
import lzma
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

CLASSES = 10


def arrays(count: int, shape: tuple[int, int, int], seed: int = 0) -> tuple[Any, Any]:
    """Images uint8 (N, C, H, W) with a bright band whose place tells the class, and labels uint8 (N)."""
    random = np.random.default_rng((seed, count, *shape))
    labels = random.permutation(np.arange(count) % CLASSES).astype(np.uint8)
    images = random.integers(0, 90, (count, *shape)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 2 + 2 * label : 5 + 2 * label, 3:-3] += 150
    return images, labels


def put(path: Path, content: bytes) -> None:
    """Write ``content``, compressed as the file's ending says."""
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))


def idx(array: Any) -> bytes:
    """An array of unsigned bytes as an idx file."""
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def records(images: Any, labels: Any) -> bytes:
    """Images (N, 3, 32, 32) as CIFAR-10 records."""
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))


def write_mnist(folder: Path, train: int = 40, test: int = 21, ending: str = ".gz") -> None:
    """The four files; one rank calls this."""
    for prefix, count in (("train", train), ("t10k", test)):
        images, labels = arrays(count, (1, 28, 28))
        put(folder / f"{prefix}-images-idx3-ubyte{ending}", idx(images[:, 0]))
        put(folder / f"{prefix}-labels-idx1-ubyte{ending}", idx(labels))


def write_cifar(folder: Path, train: int = 24, test: int = 7, ending: str = ".xz") -> None:
    """Two training batches and the test batch; one rank calls this."""
    images, labels = arrays(train, (3, 32, 32))
    half = train // 2
    put(folder / f"data_batch_1.bin{ending}", records(images[:half], labels[:half]))
    put(folder / f"data_batch_2.bin{ending}", records(images[half:], labels[half:]))
    put(folder / f"test_batch.bin{ending}", records(*arrays(test, (3, 32, 32))))


def write_hdf5(path: Path, groups: dict[str, int], shape: tuple[int, int, int] = (2, 28, 28)) -> None:
    """Datasets ``image`` and ``label`` in each group ("" for the top); one rank calls this."""
    with h5py.File(path, "w") as file:
        for group, count in groups.items():
            images, labels = arrays(count, shape)
            place = file.require_group(group) if group else file
            place.create_dataset("image", data=images, chunks=(1, shape[0], 7, 7), fletcher32=True)
            place["label"] = labels.astype(np.int64)


def written(comm: Any, folder: Path, write: Callable[[Path], None] = write_mnist) -> Path:
    """``folder`` after rank 0 has put the files there."""
    if comm.rank == 0:
        write(folder)
    comm.Barrier()
    return folder
