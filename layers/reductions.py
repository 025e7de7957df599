"""Sums and means over dimensions, split ones included: local sum, then a sum over the ranks that share the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from distconv.dispatch import implements
from distconv.functions import sum_over
from distconv.layers.alignment import result_shape
from distconv.tensor import DistTensor

Dims = int | Sequence[int] | None


def _dims(tensor: DistTensor, dim: Dims) -> list[int]:
    ndim = max(tensor.dim(), 1)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(tensor.dim()))
    return sorted({d % ndim for d in ([dim] if isinstance(dim, int) else dim)})


@implements(torch.sum, torch.Tensor.sum)
def sum(
    input: DistTensor, *dims: Any, dim: Dims = None, keepdim: bool = False, dtype: Any = None, axis: Dims = None
) -> DistTensor:
    """``torch.sum``; the result is replicated over the axes that split the summed dimensions."""
    dim, keepdim = _called(dims, dim if axis is None else axis, keepdim)
    shape = result_shape(torch.sum, input, dim, keepdim, dtype=dtype)
    summed = _dims(input, dim)
    local = input.local.sum(summed, keepdim, dtype=dtype) if summed else input.local.sum(dtype=dtype)
    total = sum_over(local, input.grid, [input.dist.split[d] for d in summed])
    axes = input.dist.axes
    if keepdim:
        left = [None if d in summed else a for d, a in enumerate(axes)]
    else:
        left = [a for d, a in enumerate(axes) if d not in summed]
    return DistTensor(total, input.dist.with_axes(left), shape)


@implements(torch.mean, torch.Tensor.mean)
def mean(
    input: DistTensor, *dims: Any, dim: Dims = None, keepdim: bool = False, dtype: Any = None, axis: Dims = None
) -> DistTensor:
    """``torch.mean``: the sum over the global number of elements."""
    dim, keepdim = _called(dims, dim if axis is None else axis, keepdim)
    result_shape(torch.mean, input, dim, keepdim, dtype=dtype)
    total = sum(input, dim=dim, keepdim=keepdim, dtype=dtype)
    count = math.prod(input.shape[d] for d in _dims(input, dim))
    return DistTensor(total.local / count, total.dist, total.shape)


def _called(dims: tuple[Any, ...], dim: Dims, keepdim: bool) -> tuple[Dims, bool]:
    """Arguments as torch takes them: ``(dim, keepdim)`` by position, or several dimensions in a row."""
    if dims and isinstance(dims[-1], bool):
        *dims, keepdim = dims  # type: ignore[assignment]
    if not dims:
        return dim, keepdim
    return (dims[0] if len(dims) == 1 else tuple(dims)), keepdim
