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
from distconv.grid import ProcessGrid
from distconv.layers.common.alignment import aligned, as_distributed, result_shape
from distconv.layers.common.block_edges import is_cyclic
from distconv.layers.common.inplace_views import changed, moved, viewed
from distconv.layers.tensor.index_select import looked_up, selected
from distconv.layers.tensor.masks import masked
from distconv.layers.tensor.slicing import ALL, cut
from distconv.tensor import DistTensor


def _entries(index: Any, count: int) -> list[Any]:
    """Return ``index`` with one entry for each of ``count`` dimensions, and its Nones."""
    entries = [_plain(e) for e in (index if isinstance(index, tuple) or _stands_for_tuple(index) else (index,))]
    named = sum(_dimensions(e) for e in entries)
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    entries[at : at + 1] = [ALL] * (count - named)
    further = [i for i, e in enumerate(entries) if e is Ellipsis]
    if further and count > named and any(e is not Ellipsis for e in entries[further[0] :]):
        # In torch each ellipsis stands for the same number of dimensions, so entries after a second one lie beyond the
        # last dimension.
        raise IndexError(f"x[index]: too many dimensions behind several ellipses for {count} dimensions. Write one.")
    return [e for e in entries if e is not Ellipsis]


def _stands_for_tuple(index: Any) -> bool:
    """Return True if torch takes this list as one entry for each dimension, as NumPy once did."""
    several = (Sequence, slice, torch.Tensor, np.ndarray, type(None), type(Ellipsis))
    return isinstance(index, (list, range)) and len(index) < 32 and any(isinstance(e, several) for e in index)


def _plain(entry: Any) -> Any:
    """Return an entry with arrays and lists converted to tensors, and integer tensors without dimensions to int."""
    if isinstance(entry, np.ndarray):
        return torch.from_numpy(entry)
    if isinstance(entry, (list, range, tuple)):
        return torch.tensor(entry, dtype=None if len(entry) else torch.int64)
    if isinstance(entry, torch.Tensor) and not entry.dim() and not _is_mask(entry):
        return int(entry)
    return entry


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, bool) or (isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8))


def _dimensions(entry: Any) -> int:
    """Return the number of dimensions that an entry indexes."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, torch.Tensor) and _is_mask(entry) else 1


def _basic(entries: Sequence[Any]) -> bool:
    """Return True if all entries are slices, integers or None."""
    return all(e is None or isinstance(e, slice) or (isinstance(e, int) and not isinstance(e, bool)) for e in entries)


@implements(torch.Tensor.__getitem__, kind=OperatorKind.VIEW, order=StridePolicy.NEW, tensors=None)
def getitem(input: torch.Tensor, index: Any) -> DistTensor:
    """Compute ``x[index]``; a split dimension that a number or a tensor indexes is gathered as far as necessary.

    Parameters as in torch.

    Raises
    ------
    NoRule
        For a mask among other indices, and for a plain tensor with several indices of which some are distributed.
    """
    entries = _entries(index, input.dim())
    if any(map(_is_mask, entries)):
        return _by_mask(input, entries)
    if not isinstance(input, DistTensor):
        if isinstance(index, DistTensor):
            return looked_up(input, index)
        raise NoRule("indexing a plain tensor with several indices of which some are distributed")
    if _basic(entries):
        return _basic_item(input, entries)
    # As in torch, and unlike NumPy, integers are applied before the positions of index tensors are determined.
    x = _basic_item(input, [ALL if isinstance(e, torch.Tensor) else e for e in entries])
    return selected(x, [e if isinstance(e, torch.Tensor) else ALL for e in entries if not isinstance(e, int)])


def _by_mask(input: torch.Tensor, entries: list[Any]) -> DistTensor:
    """Index by a mask for the first dimensions, or by a one-dimensional mask for another dimension."""
    masks = [i for i, e in enumerate(entries) if _is_mask(e)]
    at = masks[0]
    if len(masks) > 1 or isinstance(entries[at], bool) or any(e != ALL for i, e in enumerate(entries) if i != at):
        raise NoRule("indexing a DistTensor with a mask and other indices: use one after the other, or torch.where")
    mask = entries[at]
    if at == 0:
        return masked(input, mask)
    if mask.dim() > 1 or mask.shape[0] != input.shape[at]:
        raise NoRule("indexing a DistTensor with a mask for dimensions behind others: permute those to the front")
    chosen = (mask.gather() if isinstance(mask, DistTensor) else mask).nonzero()[:, 0]
    return selected(as_distributed(input, _grid(input, mask)), [ALL] * at + [chosen])


def _grid(*tensors: torch.Tensor) -> ProcessGrid:
    return next(t.grid for t in tensors if isinstance(t, DistTensor))


def _basic_item(input: DistTensor, entries: Sequence[Any]) -> DistTensor:
    out_shape = result_shape(torch.Tensor.__getitem__, input, tuple(entries))
    if all(isinstance(e, slice) for e in entries):
        return cut(input, entries)
    if input.dist.grid.size == 1:  # One call of torch, because two steps give dimensions of size 1 other strides.
        part = x = input
        local = input.local[tuple(entries)]
    else:
        per_dim = [e for e in entries if e is not None]
        part = cut(input, _as_slices(per_dim, input.shape))
        numbers = [d for d, e in enumerate(per_dim) if isinstance(e, int)]
        x = part.replicated(numbers) if any(part.dist.split[d] for d in numbers) else part
        local = x.local[tuple(e if e is None else 0 if isinstance(e, int) else ALL for e in entries)]
    axes = iter(x.dist.axes)
    named = [(e, None if e is None else next(axes)) for e in entries]
    result = DistTensor(local, x.dist.with_axes([a for e, a in named if not isinstance(e, int)]), out_shape)

    def again() -> DistTensor:
        return _basic_item(input, entries)

    if x is part:
        return viewed(result, part, again)
    return moved(result, input, again, lambda r: setitem(input, tuple(entries), r))


def _as_slices(per_dim: Sequence[Any], shape: Sequence[int]) -> list[slice]:
    """Return the entries with each integer as a slice of size one."""
    return [slice(e % n, e % n + 1) if isinstance(e, int) else e for e, n in zip(per_dim, shape, strict=True)]


@implements(torch.Tensor.__setitem__, kind=OperatorKind.VIEW, tensors=None)
def setitem(input: torch.Tensor, index: Any, value: Any) -> None:
    """Compute ``x[index] = value`` in place, for basic indices, and for a mask with a single value.

    Parameters as in torch.

    Raises
    ------
    NoRule
        For other indices, and for assigning a distributed value to a plain tensor.
    """
    if not isinstance(input, DistTensor):
        raise NoRule(
            "assigning a DistTensor to a part of a plain tensor, which is whole on every rank: make that of the "
            "distributed one, x.new_zeros(...) instead of torch.zeros(...), or gather first (dc.gather(x))"
        )
    entries = _entries(index, input.dim())
    if len(entries) and _is_mask(entries[0]) and all(e == ALL for e in entries[1:]):
        _fill(input, entries[0], value)
        return
    if not _basic(entries):
        raise NoRule(
            "x[index] = value of a DistTensor with tensors or lists as index: use torch.where, or slices and numbers"
        )
    shape = result_shape(torch.Tensor.__getitem__, input, tuple(entries))
    per_dim = [e for e in entries if e is not None]
    dealt = [d for d, e in enumerate(per_dim) if is_cyclic(input.dist, d) and e != ALL]
    if dealt:
        # A slice of a block-cyclic dimension is not a view of the block.
        whole = input.replicated(dealt).clone()
        whole[tuple(entries)] = value
        input.copy_(whole)
        return
    part = cut(input, _as_slices(per_dim, input.shape))
    if isinstance(value, torch.Tensor):
        source = aligned(_fitted(value, entries, shape, input), part.dist, part.shape)
        # x[i] += 1 assigns a view of x to itself. torch rejects this as an overlap if their strides differ.
        overlaps = source.untyped_storage().data_ptr() == part.local.untyped_storage().data_ptr()
        part.local.copy_(source.clone() if overlaps else source)
    else:
        part.local.fill_(value)
    changed(input)


def _fitted(value: torch.Tensor, entries: Sequence[Any], shape: torch.Size, input: DistTensor) -> DistTensor:
    """Return ``value`` with a dimension of size one for each integer, and without the dimensions of Nones."""
    surplus = max(0, value.dim() - len(shape))
    front = tuple(0 if n == 1 else ALL for n in value.shape[:surplus])
    values = getitem(as_distributed(value, input.grid), (*front, Ellipsis))
    result_shape(torch.Tensor.expand, values, tuple(shape))
    values = getitem(values, (None,) * (len(shape) - values.dim()) + (Ellipsis,))
    return getitem(values, tuple(None if isinstance(e, int) else 0 if e is None else ALL for e in entries))


def _fill(input: DistTensor, mask: Any, value: Any) -> None:
    """Assign one value to the elements under a mask."""
    if isinstance(mask, bool) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        raise NoRule("x[mask] = value of a DistTensor with more than one value: use x = torch.where(mask, values, x)")
    if mask.shape != input.shape[: mask.dim()]:
        raise IndexError(f"the mask {tuple(mask.shape)} does not fit the indexed tensor {tuple(input.shape)}")
    value = value.reshape(()) if isinstance(value, torch.Tensor) else value
    input.masked_fill_(mask.bool().reshape((*mask.shape, *(1,) * (input.dim() - mask.dim()))), value)
