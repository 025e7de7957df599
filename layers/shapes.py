"""Views and slices: dimensions they leave alone stay split, those they touch are gathered first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import implements
from distconv.errors import UnsupportedOperation
from distconv.layers.alignment import result_shape
from distconv.tensor import DistTensor


def _sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)


@implements(torch.reshape, torch.Tensor.reshape, torch.Tensor.view)
def reshape(input: DistTensor, *shape: Any) -> DistTensor:
    """``torch.reshape``: leading and trailing dimensions of unchanged extent keep their splits."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise UnsupportedOperation("view(dtype) of a DistTensor: convert with .to(dtype) instead")
    sizes = _sizes(shape)
    out_shape = result_shape(torch.reshape, input, sizes)
    lead, trail = _unchanged(input.shape, out_shape)
    middle = range(lead, input.dim() - trail)
    x = input.replicated(middle)
    kept = x.dist.axes[input.dim() - trail :] if trail else ()
    axes = (*x.dist.axes[:lead], *(None,) * (len(out_shape) - lead - trail), *kept)
    dist = x.dist.with_axes(axes)
    return DistTensor(x.local.reshape(dist.local_shape(out_shape)), dist, out_shape)


def _unchanged(old: Sequence[int], new: Sequence[int]) -> tuple[int, int]:
    """How many leading and how many trailing dimensions two shapes share."""
    shortest = min(len(old), len(new))
    lead = 0
    while lead < shortest and old[lead] == new[lead]:
        lead += 1
    trail = 0
    while trail < shortest - lead and old[-1 - trail] == new[-1 - trail]:
        trail += 1
    return lead, trail


@implements(torch.flatten, torch.Tensor.flatten)
def flatten(input: DistTensor, start_dim: int = 0, end_dim: int = -1) -> DistTensor:
    """``torch.flatten``."""
    return reshape(input, result_shape(torch.flatten, input, start_dim, end_dim))


@implements(torch.unflatten, torch.Tensor.unflatten)
def unflatten(input: DistTensor, dim: int, sizes: Sequence[int]) -> DistTensor:
    """``torch.unflatten``."""
    return reshape(input, result_shape(torch.unflatten, input, dim, tuple(sizes)))


@implements(torch.squeeze, torch.Tensor.squeeze)
def squeeze(input: DistTensor, dim: int | Sequence[int] | None = None) -> DistTensor:
    """``torch.squeeze``."""
    chosen = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % max(1, input.dim()) for d in chosen} & {d for d, n in enumerate(input.shape) if n == 1}
    x = input.replicated(sorted(gone))
    left = [d for d in range(input.dim()) if d not in gone]
    dist = x.dist.with_axes([x.dist.axes[d] for d in left])
    shape = torch.Size(input.shape[d] for d in left)
    return DistTensor(x.local.reshape(dist.local_shape(shape)), dist, shape)


@implements(torch.unsqueeze, torch.Tensor.unsqueeze)
def unsqueeze(input: DistTensor, dim: int) -> DistTensor:
    """``torch.unsqueeze``; the new dimension is replicated."""
    shape = result_shape(torch.unsqueeze, input, dim)
    dim %= len(shape)
    axes = (*input.dist.axes[:dim], None, *input.dist.axes[dim:])
    return DistTensor(input.local.unsqueeze(dim), input.dist.with_axes(axes), shape)


@implements(torch.permute, torch.Tensor.permute)
def permute(input: DistTensor, *dims: Any) -> DistTensor:
    """``torch.permute``: the axes move with their dimensions."""
    order = [d % input.dim() for d in _sizes(dims)]
    shape = result_shape(torch.permute, input, tuple(order))
    axes = [input.dist.axes[d] for d in order]
    return DistTensor(input.local.permute(order), input.dist.with_axes(axes), shape)


@implements(torch.transpose, torch.Tensor.transpose)
def transpose(input: DistTensor, dim0: int, dim1: int) -> DistTensor:
    """``torch.transpose``."""
    order = list(range(input.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(input, order)


@implements(torch.Tensor.__getitem__)
def getitem(input: DistTensor, index: Any) -> DistTensor:
    """Basic indexing with integers, slices, None and ``...``; dimensions that are cut are gathered first."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(not (e is None or e is Ellipsis or isinstance(e, (slice, int))) or isinstance(e, bool) for e in entries):
        raise UnsupportedOperation("indexing a DistTensor with tensors or lists; gather it first (dc.gather(x)[index])")
    named = sum(e is not None and e is not Ellipsis for e in entries)
    rest: list[Any] = [slice(None)] * (input.dim() - named)
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    entries[at : at + 1] = rest
    out_shape = result_shape(torch.Tensor.__getitem__, input, tuple(entries))
    cut: list[int] = []
    axes: list[str | None] = []
    local: list[Any] = []
    dim = 0
    for entry in entries:
        if entry is None:
            axes.append(None)
            local.append(None)
            continue
        whole = isinstance(entry, slice) and entry.indices(input.shape[dim]) == (0, input.shape[dim], 1)
        if not whole:
            cut.append(dim)
        # A slice of the whole extent takes the block whole, whatever its numbers.
        local.append(slice(None) if whole else entry)
        if not isinstance(entry, int):
            axes.append(input.dist.axes[dim] if whole else None)
        dim += 1
    x = input.replicated(cut)
    return DistTensor(x.local[tuple(local)], x.dist.with_axes(axes), out_shape)


@implements(torch.narrow, torch.Tensor.narrow)
def narrow(input: DistTensor, dim: int, start: int, length: int) -> DistTensor:
    """``torch.narrow``."""
    result_shape(torch.narrow, input, dim, start, length)
    index: list[Any] = [slice(None)] * input.dim()
    index[dim] = (
        slice(start, start + length)
        if start >= 0
        else slice(start + input.shape[dim], start + input.shape[dim] + length)
    )
    return getitem(input, tuple(index))


@implements(torch.split, torch.Tensor.split)
def split(input: DistTensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[DistTensor, ...]:
    """``torch.split``."""
    with torch._C.DisableTorchFunctionSubclass():
        parts = torch.split(torch.empty(input.shape, device="meta"), split_size_or_sections, dim)  # type: ignore[arg-type]
    return _narrowed(input, dim, [p.shape[dim] for p in parts])


@implements(torch.chunk, torch.Tensor.chunk)
def chunk(input: DistTensor, chunks: int, dim: int = 0) -> tuple[DistTensor, ...]:
    """``torch.chunk``."""
    with torch._C.DisableTorchFunctionSubclass():
        parts = torch.chunk(torch.empty(input.shape, device="meta"), chunks, dim)
    return _narrowed(input, dim, [p.shape[dim] for p in parts])


def _narrowed(input: DistTensor, dim: int, lengths: Sequence[int]) -> tuple[DistTensor, ...]:
    x = input.replicated([dim % input.dim()])
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(narrow(x, dim, start, length) for start, length in zip(starts, lengths, strict=True))


def _dimwise(function: Any, input: DistTensor, dim: int | None, **options: Any) -> DistTensor:
    """``function`` along one dimension, which is gathered if it is split, and split again."""
    if dim is None:
        raise UnsupportedOperation(f"{function.__name__} of a DistTensor without dim=: say which dimension")
    x = input.replicated([dim % input.dim()])
    return DistTensor(function(x.local, dim, **options), x.dist, x.shape).redistribute(input.dist)


@implements(F.softmax, torch.softmax, torch.Tensor.softmax)
def softmax(input: DistTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> DistTensor:
    """``F.softmax``."""
    return _dimwise(torch.softmax, input, dim, dtype=dtype)


@implements(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax)
def log_softmax(input: DistTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> DistTensor:
    """``F.log_softmax``."""
    return _dimwise(torch.log_softmax, input, dim, dtype=dtype)
