"""Selection by masks: ``x[mask]``.

Each rank selects from its block. So the blocks of the result differ in size, as the masks of the ranks do.
"""

from __future__ import annotations

import itertools

import torch

from distconv.dispatch import implements
from distconv.errors import NoRule
from distconv.layers.common.alignment import as_distributed, broadcast_shape
from distconv.layers.common.block_edges import distribution_from_edges
from distconv.process import watchdog
from distconv.tensor import DistTensor


def select_by_mask(input: torch.Tensor, mask: torch.Tensor) -> DistTensor:
    """Return ``input[mask]``, split along its first dimension.

    Collective: call on every rank. Elements keep the order of a single process. So if another dimension than the
    leading one of the mask is split, its axis first moves to the leading dimension.

    Parameters
    ----------
    input : Tensor or DistTensor
        (M1, ..., Mk, ...). It or the mask is a DistTensor.
    mask : Tensor or DistTensor
        (M1, ..., Mk).

    Returns
    -------
    DistTensor
        (number of selected elements, ...).

    Raises
    ------
    NoRule
        For a mask of another shape, or without dimensions.
    """
    dims = mask.dim()
    if not dims or mask.shape != input.shape[:dims]:
        raise NoRule(
            f"indexing a DistTensor of shape {tuple(input.shape)} with a mask of shape {tuple(mask.shape)} has no "
            "distributed rule"
        )
    like = input if isinstance(input, DistTensor) else mask
    assert isinstance(like, DistTensor)
    # Blocks of the leading dimension are consecutive in the order of elements. Dimensions of size one do not count.
    leading = next((d for d, n in enumerate(mask.shape) if n > 1), 0)
    split = like.dist.split[:dims]
    axis = split[leading] or next((a for a in split if a is not None), None)
    keeps_edges = axis == split[leading] and axis not in like.dist.cyclic
    mask_axes = [axis if d == leading else None for d in range(dims)]
    rest = [None] * (input.dim() - dims) if like is mask else like.dist.split[dims:]
    dist = (like.dist if keeps_edges else like.dist.balanced()).with_axes([*mask_axes, *rest])
    values = as_distributed(input, like.grid).redistribute(dist)
    chosen = as_distributed(mask, like.grid).redistribute(dist.with_axes(mask_axes))
    local = values.local[chosen.local.bool()]
    edges = {a: b for a, b in dist.boundaries.items() if a in rest}
    counts = [len(local)]
    # The numbers determine the edges, which every rank must know for the whole distribution.
    if axis is not None:
        with watchdog.waiting(lambda: "number of elements under a mask"):
            counts = like.grid.comm([axis]).allgather(len(local))
        edges[axis] = (0, *itertools.accumulate(counts))
    target = distribution_from_edges(
        like.grid, [axis, *rest], edges, {a: s for a, s in dist.cyclic.items() if a in rest}
    )
    return DistTensor(local, target, torch.Size((sum(counts), *input.shape[dims:])))


@implements(torch.masked_select, torch.Tensor.masked_select, tensors="input mask")
def masked_select(input: torch.Tensor, mask: torch.Tensor) -> DistTensor:
    """Compute ``torch.masked_select`` from the ranks' blocks.

    Parameters
    ----------
    input, mask
        As in ``torch.masked_select``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        For one element, or a mask that is not of bool.
    """
    shape = broadcast_shape((input.shape, mask.shape))
    if mask.dtype != torch.bool or not shape:
        raise NoRule("torch.masked_select of one element, or with a mask that is not bool, has no distributed rule")
    return select_by_mask(*(t if t.shape == shape else t.expand(shape) for t in (input, mask)))
