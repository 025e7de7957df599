"""Files of tensors: HDF5 laid out in memory, and checksums."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Container, Iterable, Mapping

import h5py
import torch


def file_of(tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """An HDF5 file of ``tensors`` by name, in pieces; those of values are their own memory.

    ``tensors`` are contiguous and on the host. HDF5 lays the file out, but does not write it: a disk that fills up
    meanwhile ends the process with a segmentation fault.
    """
    most = room_for({name: tensor.nbytes for name, tensor in tensors.items()})
    layout = _Layout(-1, most, mmap.MAP_PRIVATE)
    with h5py.File(layout, "w") as file:
        offsets = {name: _make_room(file, name_in_file(name, tensors), x) for name, x in tensors.items()}
    described, pieces, at = memoryview(layout), [], 0
    for offset, name in sorted((offset, name) for name, offset in offsets.items() if offset is not None):
        values = tensors[name].detach().view(-1).view(torch.uint8).numpy().data
        pieces += [described[at:offset], values]
        at = offset + len(values)
    return [*pieces, described[at : layout.used]]


def name_in_file(name: str, others: Container[str]) -> str:
    """Return the HDF5 path of the tensor ``name`` in a file that has ``others``, too.

    It is the name, unless HDF5 would take that for another one: a parameter ``t/850`` next to ``t`` would have to
    lie in a dataset, and ``a//b`` is ``a/b``.
    """
    parts = name.split("/")
    lies_in_another = any("/".join(parts[:count]) in others for count in range(1, len(parts)))
    return escaped(name) if lies_in_another or "%" in name or {"", ".", ".."} & set(parts) else name


def escaped(name: str) -> str:
    """Return the name as one word of an HDF5 path."""
    return name.replace("%", "%25").replace("/", "%2F").replace(".", "%2E")


def room_for(sizes: Mapping[str, int]) -> int:
    """More bytes than a file takes of tensors of these names and bytes."""
    described = (_MOST_DESCRIBING * (2 + name.count("/")) + len(name) + size for name, size in sizes.items())
    return _MOST_DESCRIBING + sum(described)


_MOST_DESCRIBING = 2**12
"""More bytes than HDF5 takes to describe a file, a folder in it or a dataset. Pages without any take no memory."""

_BITS = {1: torch.int8, 2: torch.int16}
"""Integers by their bytes."""


class _Layout(mmap.mmap):
    """Memory that HDF5 takes for a file, which is as long as HDF5 has said last; values are never written to it."""

    used = 0

    def truncate(self, size: int) -> None:
        self.used = size

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:  # type: ignore[override]  # None before Python 3.13
        to += self.used if whence == os.SEEK_END else 0
        super().seek(to)
        return to


def _make_room(file: h5py.File, name: str, tensor: torch.Tensor) -> int | None:
    """Let ``file`` have a dataset like ``tensor``; where its values go, if it has any."""
    groups = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    groups.set_create_intermediate_group(True)
    at_once = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    at_once.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    at_once.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(torch.empty(0, dtype=stored_as(tensor.dtype)).numpy().dtype, logical=True)
    shape = h5py.h5s.create_simple(tuple(tensor.shape))
    offset: int | None = h5py.h5d.create(file.id, name.encode(), kind, shape, at_once, groups).get_offset()
    return offset


def stored_as(dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are in a file: the same, or integers of their bits where NumPy has no such type.

    Raises
    ------
    TypeError
        With torch's text, for a type that files cannot hold.
    """
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        if dtype.itemsize not in _BITS:
            raise
        return _BITS[dtype.itemsize]
    return dtype


def digest_of(pieces: Iterable[bytes | memoryview]) -> str:
    """The checksum of a file."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
