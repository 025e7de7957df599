"""Blocks of tensors in files: the check that they cover their tensor, and copies of the parts that a rank needs.

Manifests call such a block a piece. ``schema`` checks the pieces, ``reading`` copies from them. This module contains no
MPI.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import torch

from distconv.checkpoint.files import escape_name, storage_dtype
from distconv.data.opened_file import resolve_internal_link
from distconv.distribution import Box, Interval, slices_within
from distconv.errors import CheckpointError, DataError

MAX_CELLS = 10**6
"""Upper bound on the cells of a grid of pieces. A manifest with more was not written by distconv."""


def piece_box(piece: Mapping[str, Any]) -> Box:
    """Return the box of a piece in its tensor, in global indices."""
    return tuple(Interval(start, stop) for start, stop in piece["box"])


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor."""
    return tuple(Interval(0, extent) for extent in shape)


def check_cover(name: str, entry: Mapping[str, Any]) -> None:
    """Check that the pieces of a tensor hold each of its elements exactly once.

    Parameters
    ----------
    name : str
        The tensor, for the error.
    entry : mapping
        Its entry in the manifest: ``shape`` and ``pieces``.

    Raises
    ------
    CheckpointError
        If an element is missing, has two pieces, or a piece lies outside the shape.
    """
    shape, boxes = entry["shape"], [piece_box(piece) for piece in entry["pieces"]]
    for box in boxes:
        if len(box) != len(shape) or not all(0 <= i.start <= i.stop <= e for i, e in zip(box, shape, strict=True)):
            raise CheckpointError(f"a piece of {name!r} lies outside its shape {tuple(shape)}")
    # The edges of all boxes split the tensor into cells. Each cell is inside a box or outside of it. So it is enough to
    # count the boxes of each cell, whatever the size of the tensor.
    edges = [sorted({0, extent, *(e for box in boxes for e in box[dim])}) for dim, extent in enumerate(shape)]
    # Before any cell takes memory: the manifest may come from anyone.
    if math.prod(len(each) for each in edges) > MAX_CELLS:
        raise CheckpointError(f"{name!r} lies in {len(boxes)} blocks that do not form a grid")
    times = np.zeros([len(each) - 1 for each in edges], dtype=np.int64)
    places = [{edge: place for place, edge in enumerate(each)} for each in edges]
    for box in boxes:
        times[tuple(slice(at[i.start], at[i.stop]) for i, at in zip(box, places, strict=True))] += 1
    sizes = np.ones_like(times)
    for dim, each in enumerate(edges):
        sizes *= np.diff(each).reshape([-1] + [1] * (len(edges) - dim - 1))
    # Cells without elements may be covered by any number of boxes.
    if sizes[times != 1].any():
        raise CheckpointError(
            f"the pieces of {name!r} cover {sizes[times > 0].sum()} of {math.prod(shape)} elements, "
            f"{sizes[times > 1].sum()} of them more than once"
        )


def copy_piece(file: h5py.File, name: str, box: Box, out: torch.Tensor, needed: Box) -> None:
    """Copy the intersection of a piece and a needed box from a file to a tensor.

    Parameters
    ----------
    file : h5py.File
        The file that holds the piece.
    name : str
        The tensor.
    box : Box
        Global box of the piece.
    out : Tensor
        Destination; its shape is that of ``needed``.
    needed : Box
        Global box that the rank needs.

    Raises
    ------
    CheckpointError
        If the file has no such piece, or it has another dtype or shape.
    """
    try:
        # A file has the name in one of both forms, by the other names in it (dataset_path).
        places = (each for each in (escape_name(name), name) if resolve_internal_link(file, each) == f"/{each}")
        stored = next((entry for each in places if isinstance(entry := file[each], h5py.Dataset)), None)
    except DataError:
        stored = None
    # distconv writes contiguous datasets only. A compressed one might take any size in memory.
    if not isinstance(stored, h5py.Dataset) or stored.is_virtual or stored.external or stored.chunks:
        raise CheckpointError(f"there is no dataset {name!r} in its file")
    kept_as = torch.empty(0, dtype=storage_dtype(out.dtype), device="cpu").numpy().dtype
    if stored.shape != tuple(i.extent for i in box) or stored.dtype != kept_as:
        raise CheckpointError(f"a piece of {name!r} is {stored.dtype} {stored.shape}")
    both = tuple(one.intersect(other) for one, other in zip(box, needed, strict=True))
    # HDF5 reads the intersection only.
    values = torch.from_numpy(np.asarray(stored[slices_within(both, box)]))
    as_bits = storage_dtype(out.dtype) != out.dtype
    out[slices_within(both, needed)] = values.view(out.dtype) if as_bits else values


def is_needed(box: Box, needed: Box) -> bool:
    """Return True if a piece must be read: it intersects the needed box, or is empty.

    All ranks read the files of empty pieces, so that these files are verified, too.

    Parameters
    ----------
    box : Box
        Global box of the piece.
    needed : Box
        Global box that the rank needs.
    """
    # An empty piece, too: it belongs to a file that some rank must verify.
    return not all(i.extent for i in box) or all(one.intersect(at).extent for one, at in zip(box, needed, strict=True))
