"""``x[mask]``: each rank picks from its block, so that ranks have about as many elements as they have there."""

from __future__ import annotations

import itertools

import torch

from distconv.dispatch import implements
from distconv.errors import NoRule
from distconv.layers.plumbing.alignment import as_distributed, broadcast_shape
from distconv.layers.plumbing.block_edges import layout
from distconv.process import watchdog
from distconv.tensor import DistTensor


def masked(input: torch.Tensor, mask: torch.Tensor) -> DistTensor:
    """``input[mask]``, whose first dimension is split as the leading one of those that the mask is for.

    Elements come in the order of one process, so another dimension of these that is split changes places with that.

    Raises
    ------
    NoRule
        For a mask of another shape, or of no dimensions.
    """
    dims = mask.dim()
    if not dims or mask.shape != input.shape[:dims]:
        raise NoRule(f"indexing a DistTensor of {tuple(input.shape)} with a mask of {tuple(mask.shape)}")
    like = input if isinstance(input, DistTensor) else mask
    assert isinstance(like, DistTensor)
    leading = next((d for d, n in enumerate(mask.shape) if n > 1), 0)
    split = like.dist.split[:dims]
    axis = split[leading] or next((a for a in split if a is not None), None)
    stays = axis == split[leading] and axis not in like.dist.cyclic
    picked = [axis if d == leading else None for d in range(dims)]
    rest = [None] * (input.dim() - dims) if like is mask else like.dist.split[dims:]
    dist = (like.dist if stays else like.dist.balanced()).with_axes([*picked, *rest])
    values = as_distributed(input, like.grid).redistribute(dist)
    chosen = as_distributed(mask, like.grid).redistribute(dist.with_axes(picked))
    local = values.local[chosen.local.bool()]
    edges = {a: b for a, b in dist.boundaries.items() if a in rest}
    counts = [len(local)]
    if axis is not None:
        with watchdog.waiting(lambda: "number of elements under a mask"):
            counts = like.grid.comm([axis]).allgather(len(local))
        edges[axis] = (0, *itertools.accumulate(counts))
    target = layout(like.grid, [axis, *rest], edges, {a: s for a, s in dist.cyclic.items() if a in rest})
    return DistTensor(local, target, torch.Size((sum(counts), *input.shape[dims:])))


@implements(torch.masked_select, torch.Tensor.masked_select, tensors="input mask")
def masked_select(input: torch.Tensor, mask: torch.Tensor) -> DistTensor:
    """``torch.masked_select``.

    Raises
    ------
    NoRule
        For one element, or a mask that is not of bool.
    """
    shape = broadcast_shape((input.shape, mask.shape))
    if mask.dtype != torch.bool or not shape:
        raise NoRule("masked_select of one element, or with a mask that is not of bool")
    return masked(*(t if t.shape == shape else t.expand(shape) for t in (input, mask)))
