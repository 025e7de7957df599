"""Files of tensors: layout of HDF5 in memory, and checksums.

``writing``, ``reading``, ``pieces`` and ``schema`` call this module. It contains no MPI.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Container, Iterable, Mapping

import h5py
import torch


def hdf5_image(tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """Return the bytes of an HDF5 file of ``tensors``, without a copy of their values.

    HDF5 lays the file out in memory but does not write it: if the disk became full, HDF5 would end the process with a
    segmentation fault.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Contiguous tensors on the CPU.

    Returns
    -------
    list of memoryview
        The file in consecutive parts. Parts with values are the tensors' own memory.
    """
    most = max_file_bytes({name: tensor.nbytes for name, tensor in tensors.items()})
    # Private memory without a file: pages that HDF5 does not write take no space.
    layout = _ImageMemory(-1, most, mmap.MAP_PRIVATE)
    with h5py.File(layout, "w") as file:
        offsets = {name: _create_dataset(file, dataset_path(name, tensors), x) for name, x in tensors.items()}
    described, pieces, at = memoryview(layout), [], 0
    # The file is HDF5's own bytes, with the values of each tensor in between, at the offset that HDF5 has reserved.
    for offset, name in sorted((offset, name) for name, offset in offsets.items() if offset is not None):
        values = tensors[name].detach().view(-1).view(torch.uint8).numpy().data
        pieces += [described[at:offset], values]
        at = offset + len(values)
    return [*pieces, described[at : layout.used]]


def dataset_path(name: str, others: Container[str]) -> str:
    """Return the HDF5 path of a tensor in a file.

    The path is the name, unless HDF5 would interpret it differently: a parameter ``t/850`` next to ``t`` would have to
    be in a dataset, and ``a//b`` is ``a/b``.

    Parameters
    ----------
    name : str
        Name of the tensor.
    others : container of str
        Names of all tensors in the file.

    Returns
    -------
    str
        The path: ``name``, or ``name`` escaped by :func:`escape_name`.
    """
    # HDF5 cannot have a dataset inside another one: of the names a and a/b the second one is escaped.
    parts = name.split("/")
    lies_in_another = any("/".join(parts[:count]) in others for count in range(1, len(parts)))
    return escape_name(name) if lies_in_another or "%" in name or {"", ".", ".."} & set(parts) else name


def escape_name(name: str) -> str:
    """Return the name as a single component of an HDF5 path."""
    return name.replace("%", "%25").replace("/", "%2F").replace(".", "%2E")


def max_file_bytes(sizes: Mapping[str, int]) -> int:
    """Return an upper bound on the bytes of a file.

    Parameters
    ----------
    sizes : mapping of str to int
        Bytes of the values of each tensor in the file.

    Returns
    -------
    int
        The bound; schema rejects a larger file, and it is reserved, without being filled, for the layout.
    """
    described = (_METADATA_BYTES * (2 + name.count("/")) + len(name) + size for name, size in sizes.items())
    return _METADATA_BYTES + sum(described)


_METADATA_BYTES = 2**12
"""Upper bound on HDF5's own bytes for a file, a folder or a dataset. Pages that stay unused take no memory."""

_BIT_DTYPES = {1: torch.int8, 2: torch.int16}
"""Integer dtypes by their size in bytes."""


class _ImageMemory(mmap.mmap):
    """Memory that HDF5 uses as a file. HDF5 sets its length by ``truncate``, and never writes values to it."""

    used = 0

    def truncate(self, size: int) -> None:
        self.used = size

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:  # type: ignore[override]  # None before Python 3.13
        to += self.used if whence == os.SEEK_END else 0
        super().seek(to)
        return to


def _create_dataset(file: h5py.File, name: str, tensor: torch.Tensor) -> int | None:
    """Create a dataset like ``tensor`` in ``file``; return the offset of its values, or None if it has none."""
    groups = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    groups.set_create_intermediate_group(True)
    # Space is reserved at once, so that the offset is known, and never filled: the values are inserted when the file is
    # written.
    at_once = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    at_once.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    at_once.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(torch.empty(0, dtype=storage_dtype(tensor.dtype)).numpy().dtype, logical=True)
    shape = h5py.h5s.create_simple(tuple(tensor.shape))
    offset: int | None = h5py.h5d.create(file.id, name.encode(), kind, shape, at_once, groups).get_offset()
    return offset


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor's values in a file.

    Parameters
    ----------
    dtype : torch.dtype
        Dtype of the tensor.

    Returns
    -------
    torch.dtype
        The same, or integers with the same bits if NumPy has no such dtype, as for bfloat16.

    Raises
    ------
    TypeError
        With torch's message, for a dtype that files cannot hold.
    """
    try:
        torch.empty(0, dtype=dtype).numpy()
    # NumPy does not know the dtype. Its bits are stored as integers.
    except TypeError:
        if dtype.itemsize not in _BIT_DTYPES:
            raise
        return _BIT_DTYPES[dtype.itemsize]
    return dtype


def sha256_of(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 checksum, in hexadecimal digits, of the concatenated ``pieces``."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
