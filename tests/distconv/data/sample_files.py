"""Small HDF5 files of samples for the tests of reading and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from distconv.data.hdf5 import DatasetLayout

SAMPLES, CHANNELS, HEIGHT, WIDTH = 7, 3, 9, 10
LAYOUTS = {"x": DatasetLayout("float32", (None, CHANNELS, None, None)), "y": DatasetLayout("uint8", (None, None, None))}


def arrays() -> tuple[Any, Any]:
    """Images (N, C, H, W) and label maps (N, H, W)."""
    random = np.random.default_rng(5)
    x = random.standard_normal((SAMPLES, CHANNELS, HEIGHT, WIDTH)).astype(np.float32)
    return x, random.integers(0, 2, (SAMPLES, HEIGHT, WIDTH)).astype(np.uint8)


def write(path: Path, comm: Any, **replaced: Any) -> None:
    """Rank 0 writes datasets ``x`` and ``y`` with checksums; ``replaced`` gives others, or None to leave one out."""
    if comm.rank == 0:
        x, y = arrays()
        with h5py.File(path, "w") as file:
            for name, values in ({"x": x, "y": y} | replaced).items():
                if values is not None:
                    file.create_dataset(
                        name, data=values, chunks=(1, *(min(3, extent) for extent in values.shape[1:])), fletcher32=True
                    )
    comm.Barrier()


def flip_bit(path: Path, dataset: str, chunk: int) -> None:
    """Flip one bit in the stored values of a chunk."""
    with h5py.File(path, "r") as file:
        offset = file[dataset].id.get_chunk_info(chunk).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 5] ^= 0x10
    path.write_bytes(content)


def common(comm: Any, error: BaseException) -> str:
    """The text of an error, which must be the same on all ranks; and the communicator still works."""
    texts = comm.allgather(f"{type(error).__name__}: {error}")
    assert len(set(texts)) == 1, texts
    assert comm.allreduce(1) == comm.size
    return texts[0]
