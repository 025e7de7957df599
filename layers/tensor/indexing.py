"""``x[index]`` and ``x[index] = value``.

This module parses the index. Slices are cut by :mod:`~distconv.layers.tensor.slicing`, tensors of indices are handled
by :mod:`~distconv.layers.tensor.index_select`, and masks by :mod:`~distconv.layers.tensor.masks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from distconv.dispatch import OperatorKind, StridePolicy, implements
from distconv.errors import NoRule
from distconv.layers.common.alignment import as_distributed, broadcast_block, first_grid, result_shape
from distconv.layers.common.block_edges import is_cyclic
from distconv.layers.common.inplace_views import record_copied_view, record_inplace_change, record_shared_view
from distconv.layers.tensor.index_select import look_up_rows, select_indexed
from distconv.layers.tensor.masks import select_by_mask
from distconv.layers.tensor.slicing import ALL, slice_dims
from distconv.tensor import DistTensor


def _parse_index(index: Any, count: int) -> list[Any]:
    """Return ``index`` with one entry for each of ``count`` dimensions, and its Nones."""
    # 1. One entry for each dimension that is named. 2. The first ellipsis, or the end, stands for the rest.
    entries = [_parse_entry(e) for e in (index if isinstance(index, tuple) or _is_legacy_tuple(index) else (index,))]
    named = sum(_indexed_dims(e) for e in entries)
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    entries[at : at + 1] = [ALL] * (count - named)
    other_ellipses = [i for i, e in enumerate(entries) if e is Ellipsis]
    if other_ellipses and count > named and any(e is not Ellipsis for e in entries[other_ellipses[0] :]):
        # In torch each ellipsis stands for the same number of dimensions, so entries after a second one lie beyond the
        # last dimension.
        raise IndexError(
            f"x[index]: too many dimensions after several ellipses for {count} dimensions. Write one ellipsis."
        )
    return [e for e in entries if e is not Ellipsis]


def _is_legacy_tuple(index: Any) -> bool:
    """Return True if torch takes this list as one entry for each dimension, as NumPy once did."""
    several = (Sequence, slice, torch.Tensor, np.ndarray, type(None), type(Ellipsis))
    return isinstance(index, (list, range)) and len(index) < 32 and any(isinstance(e, several) for e in index)


def _parse_entry(entry: Any) -> Any:
    """Return an entry with arrays and lists converted to tensors, and integer tensors without dimensions to int."""
    if isinstance(entry, np.ndarray):
        return torch.from_numpy(entry)
    if isinstance(entry, (list, range, tuple)):
        return torch.tensor(entry, dtype=None if len(entry) else torch.int64)
    if isinstance(entry, torch.Tensor) and not entry.dim() and not _is_mask(entry):
        # Collective if it is a DistTensor, whose value is then the same on all ranks.
        return int(entry)
    return entry


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, bool) or (isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8))


def _indexed_dims(entry: Any) -> int:
    """Return the number of dimensions that an entry indexes."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, torch.Tensor) and _is_mask(entry) else 1


def _is_basic(entries: Sequence[Any]) -> bool:
    """Return True if all entries are slices, integers or None."""
    return all(e is None or isinstance(e, slice) or (isinstance(e, int) and not isinstance(e, bool)) for e in entries)


@implements(torch.Tensor.__getitem__, kind=OperatorKind.VIEW, order=StridePolicy.NEW, tensors=None)
def getitem(input: torch.Tensor, index: Any) -> DistTensor:
    """Compute ``x[index]``; a split dimension that a number or a tensor indexes is gathered as far as necessary.

    Parameters
    ----------
    input, index
        As in ``torch.Tensor.__getitem__``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        For a mask among other indices, and for a plain tensor with several indices of which some are distributed.
    """
    entries = _parse_index(index, input.dim())
    if any(map(_is_mask, entries)):
        return _index_by_mask(input, entries)
    if not isinstance(input, DistTensor):
        if isinstance(index, DistTensor):
            return look_up_rows(input, index)
        raise NoRule("indexing a plain tensor with several indices, some of them distributed, has no distributed rule")
    if _is_basic(entries):
        return _index_basic(input, entries)
    # As in torch, and unlike NumPy, integers are applied before the positions of index tensors are determined.
    x = _index_basic(input, [ALL if isinstance(e, torch.Tensor) else e for e in entries])
    return select_indexed(x, [e if isinstance(e, torch.Tensor) else ALL for e in entries if not isinstance(e, int)])


def _index_by_mask(input: torch.Tensor, entries: list[Any]) -> DistTensor:
    """Index by a mask for the first dimensions, or by a one-dimensional mask for another dimension."""
    masks = [i for i, e in enumerate(entries) if _is_mask(e)]
    at = masks[0]
    if len(masks) > 1 or isinstance(entries[at], bool) or any(e != ALL for i, e in enumerate(entries) if i != at):
        raise NoRule(
            "indexing a DistTensor with a mask and other indices has no distributed rule: use one after the other, "
            "or torch.where"
        )
    mask = entries[at]
    if at == 0:
        return select_by_mask(input, mask)
    if mask.dim() > 1 or mask.shape[0] != input.shape[at]:
        raise NoRule(
            "indexing a DistTensor with a mask after other dimensions has no distributed rule: permute the mask's "
            "dimensions to the front"
        )
    # A mask of one dimension stands for the indices of its True elements.
    chosen = (mask.gather() if isinstance(mask, DistTensor) else mask).nonzero()[:, 0]
    return select_indexed(as_distributed(input, first_grid(input, mask)), [ALL] * at + [chosen])


def _index_basic(input: DistTensor, entries: Sequence[Any]) -> DistTensor:
    out_shape = result_shape(torch.Tensor.__getitem__, input, tuple(entries))
    if all(isinstance(e, slice) for e in entries):
        return slice_dims(input, entries)
    if input.dist.grid.size == 1:  # One call of torch, because two steps give dimensions of size 1 other strides.
        part = x = input
        local = input.local[tuple(entries)]
    else:
        # 1. Slices; an integer becomes a slice of one index. 2. Gather dimensions of integers, of which one rank has
        # the element. 3. Remove the dimensions of integers, and add those of Nones.
        per_dim = [e for e in entries if e is not None]
        part = slice_dims(input, _as_slices(per_dim, input.shape))
        numbers = [d for d, e in enumerate(per_dim) if isinstance(e, int)]
        x = part.replicated(numbers) if any(part.dist.split[d] for d in numbers) else part
        local = x.local[tuple(e if e is None else 0 if isinstance(e, int) else ALL for e in entries)]
    axes = iter(x.dist.axes)
    named = [(e, None if e is None else next(axes)) for e in entries]
    result = DistTensor(local, x.dist.with_axes([a for e, a in named if not isinstance(e, int)]), out_shape)

    def retake() -> DistTensor:
        return _index_basic(input, entries)

    if x is part:
        return record_shared_view(result, part, retake)
    return record_copied_view(result, input, retake, lambda r: setitem(input, tuple(entries), r))


def _as_slices(per_dim: Sequence[Any], shape: Sequence[int]) -> list[slice]:
    """Return the entries with each integer as a slice of size one."""
    return [slice(e % n, e % n + 1) if isinstance(e, int) else e for e, n in zip(per_dim, shape, strict=True)]


@implements(torch.Tensor.__setitem__, kind=OperatorKind.VIEW, tensors=None)
def setitem(input: torch.Tensor, index: Any, value: Any) -> None:
    """Compute ``x[index] = value`` in place, for basic indices, and for a mask with a single value.

    Parameters
    ----------
    input, index, value
        As in ``torch.Tensor.__setitem__``.

    Raises
    ------
    NoRule
        For other indices, and for assigning a distributed value to a plain tensor.
    """
    if not isinstance(input, DistTensor):
        raise NoRule(
            "a DistTensor cannot be assigned to a part of a plain tensor: create the target from the DistTensor "
            "(x.new_zeros(...) instead of torch.zeros(...)), or gather first (dc.gather(x))"
        )
    entries = _parse_index(index, input.dim())
    if len(entries) and _is_mask(entries[0]) and all(e == ALL for e in entries[1:]):
        _fill_masked(input, entries[0], value)
        return
    if not _is_basic(entries):
        raise NoRule(
            "x[index] = value of a DistTensor, with tensors or lists as index, has no distributed rule: use "
            "torch.where, "
            "or slices and numbers"
        )
    shape = result_shape(torch.Tensor.__getitem__, input, tuple(entries))
    per_dim = [e for e in entries if e is not None]
    cyclic_dims = [d for d, e in enumerate(per_dim) if is_cyclic(input.dist, d) and e != ALL]
    if cyclic_dims:
        # A slice of a block-cyclic dimension is not a view of the block.
        gathered = input.replicated(cyclic_dims).clone()
        gathered[tuple(entries)] = value
        input.copy_(gathered)
        return
    part = slice_dims(input, _as_slices(per_dim, input.shape))
    # Each rank writes to its block of the slice, which is a view of its block of `input`.
    if isinstance(value, torch.Tensor):
        # The value moves to the owners of the part, which is a view of the block.
        source = broadcast_block(_fit_value(value, entries, shape, input), part.dist, part.shape)
        # x[i] += 1 assigns a view of x to itself. torch rejects this as an overlap if their strides differ.
        overlaps = source.untyped_storage().data_ptr() == part.local.untyped_storage().data_ptr()
        part.local.copy_(source.clone() if overlaps else source)
    else:
        part.local.fill_(value)
    record_inplace_change(input)


def _fit_value(value: torch.Tensor, entries: Sequence[Any], shape: torch.Size, input: DistTensor) -> DistTensor:
    """Return ``value`` with a dimension of size one for each integer, and without the dimensions of Nones."""
    # torch permits surplus leading dimensions of size one. The others give the error of expand below.
    surplus = max(0, value.dim() - len(shape))
    front = tuple(0 if n == 1 else ALL for n in value.shape[:surplus])
    values = getitem(as_distributed(value, input.grid), (*front, Ellipsis))
    result_shape(torch.Tensor.expand, values, tuple(shape))
    values = getitem(values, (None,) * (len(shape) - values.dim()) + (Ellipsis,))
    return getitem(values, tuple(None if isinstance(e, int) else 0 if e is None else ALL for e in entries))


def _fill_masked(input: DistTensor, mask: Any, value: Any) -> None:
    """Assign one value to the elements under a mask."""
    if isinstance(mask, bool) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        raise NoRule(
            "x[mask] = value of a DistTensor, with more than one value, has no distributed rule: use x = "
            "torch.where(mask, values, x)"
        )
    if mask.shape != input.shape[: mask.dim()]:
        raise IndexError(f"the mask {tuple(mask.shape)} does not fit the indexed tensor {tuple(input.shape)}")
    value = value.reshape(()) if isinstance(value, torch.Tensor) else value
    input.masked_fill_(mask.bool().reshape((*mask.shape, *(1,) * (input.dim() - mask.dim()))), value)
