"""cat and stack: on the blocks when the operands' layouts agree, else after aligning them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distconv.dispatch import implements
from distconv.errors import UnsupportedOperation
from distconv.layers.alignment import as_distributed, result_shape
from distconv.tensor import DistTensor


def _first(tensors: Sequence[torch.Tensor]) -> DistTensor:
    return next(t for t in tensors if isinstance(t, DistTensor))


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[torch.Tensor], dim: int = 0, *, out: None = None) -> DistTensor:
    """``torch.cat``; plain tensors count as replicated. Along a split dimension it is gathered and split again."""
    if out is not None:
        raise UnsupportedOperation("torch.cat with out=: assign the result instead")
    out_shape = result_shape(torch.cat, tuple(tensors), dim)
    like = _first(tensors)
    if any(t.dim() != like.dim() for t in tensors):
        raise UnsupportedOperation("torch.cat of tensors with different numbers of dimensions")
    dim %= like.dim()
    target = like.dist.balanced() if like.dist.split[dim] else like.dist
    joined = target.replicate([dim])
    blocks = [as_distributed(t, like.grid).redistribute(joined).local for t in tensors]
    return DistTensor(torch.cat(blocks, dim), joined, out_shape).redistribute(target)


@implements(torch.stack)
def stack(tensors: Sequence[torch.Tensor], dim: int = 0, *, out: None = None) -> DistTensor:
    """``torch.stack``; the new dimension is replicated."""
    if out is not None:
        raise UnsupportedOperation("torch.stack with out=: assign the result instead")
    out_shape = result_shape(torch.stack, tuple(tensors), dim)
    like = _first(tensors)
    dim %= like.dim() + 1
    blocks = [as_distributed(t, like.grid).redistribute(like.dist).local for t in tensors]
    axes = (*like.dist.axes[:dim], None, *like.dist.axes[dim:])
    return DistTensor(torch.stack(blocks, dim), like.dist.with_axes(axes), out_shape)
