"""Files that are whole or not there, and tensors as HDF5 in memory."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import torch
from numpy.typing import NDArray


def image_of(tensors: Mapping[str, torch.Tensor]) -> memoryview:
    """An HDF5 file of ``tensors`` by name; a copy of them.

    In memory: a disk that fills up while HDF5 writes to it ends the process with a segmentation fault. Not by HDF5's
    own driver for that, which keeps other threads waiting while it hands the file out.
    """
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        for name, tensor in tensors.items():
            file[name] = _array(tensor)
    return image.getbuffer()


def _array(tensor: torch.Tensor) -> NDArray[np.generic]:
    host = tensor.detach().cpu().contiguous()
    # NumPy has no bfloat16: its bits go as integers.
    return host.view(torch.int16).numpy() if host.dtype is torch.bfloat16 else host.numpy()


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write beside ``path``, force it to the disk, then give it its name."""
    partial = path.with_name(f"{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
