"""Pieces of tensors in files: whether they cover their tensor, and the part of each that a rank needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import torch

from distconv.checkpoint.files import escaped, stored_as
from distconv.data.opened_file import own_place
from distconv.distribution import Box, Interval, slices_within
from distconv.errors import CheckpointError, DataError

MOST_CELLS = 10**6
"""More than any grid of pieces has: a manifest that claims so many was not written by us."""


def box_of(piece: Mapping[str, Any]) -> Box:
    """Which elements of its tensor a piece is."""
    return tuple(Interval(start, stop) for start, stop in piece["box"])


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple(Interval(0, extent) for extent in shape)


def check_cover(name: str, entry: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the pieces of a tensor hold each of its elements once.

    Raises
    ------
    CheckpointError
        If they do not.
    """
    shape, boxes = entry["shape"], [box_of(piece) for piece in entry["pieces"]]
    if not all(_lies_in(box, shape) for box in boxes):
        raise CheckpointError(f"a piece of {name!r} lies outside its shape {tuple(shape)}")
    # The edges of all boxes cut the tensor into cells, each of which a box has in whole or not at all.
    edges = [sorted({0, extent, *(e for box in boxes for e in box[dim])}) for dim, extent in enumerate(shape)]
    if math.prod(len(each) for each in edges) > MOST_CELLS:
        raise CheckpointError(f"{name!r} lies in {len(boxes)} pieces that form no grid")
    times = np.zeros([len(each) - 1 for each in edges], dtype=np.int64)
    places = [{edge: place for place, edge in enumerate(each)} for each in edges]
    for box in boxes:
        times[tuple(slice(at[i.start], at[i.stop]) for i, at in zip(box, places, strict=True))] += 1
    sizes = np.ones_like(times)
    for dim, each in enumerate(edges):
        sizes *= np.diff(each).reshape([-1] + [1] * (len(edges) - dim - 1))
    if sizes[times != 1].any():
        raise CheckpointError(
            f"the pieces of {name!r} cover {sizes[times > 0].sum()} of {math.prod(shape)} elements, "
            f"{sizes[times > 1].sum()} of them more than once"
        )


def _lies_in(box: Box, shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(0 <= i.start <= i.stop <= e for i, e in zip(box, shape, strict=True))


def copy_piece(file: h5py.File, name: str, box: Box, out: torch.Tensor, needed: Box) -> None:
    """Copy what the piece ``box`` of a tensor has of the box ``needed`` to ``out``, which is that box.

    Raises
    ------
    CheckpointError
        If the file has no such piece.
    """
    try:
        places = (each for each in (escaped(name), name) if own_place(file, each) == f"/{each}")
        stored = next((entry for each in places if isinstance(entry := file[each], h5py.Dataset)), None)
    except DataError:
        stored = None
    # Values lie in it as they are: what is compressed may become any size.
    if not isinstance(stored, h5py.Dataset) or stored.is_virtual or stored.external or stored.chunks:
        raise CheckpointError(f"there is no dataset {name!r} in its file")
    kept_as = torch.empty(0, dtype=stored_as(out.dtype), device="cpu").numpy().dtype
    if stored.shape != tuple(i.extent for i in box) or stored.dtype != kept_as:
        raise CheckpointError(f"a piece of {name!r} is {stored.dtype} {stored.shape}")
    both = tuple(one.intersect(other) for one, other in zip(box, needed, strict=True))
    values = torch.from_numpy(np.asarray(stored[slices_within(both, box)]))
    as_bits = stored_as(out.dtype) != out.dtype
    out[slices_within(both, needed)] = values.view(out.dtype) if as_bits else values


def is_needed(box: Box, needed: Box) -> bool:
    """Whether they have elements in common. An empty piece is needed by all: its file must be whole, too."""
    return not all(i.extent for i in box) or all(one.intersect(at).extent for one, at in zip(box, needed, strict=True))
