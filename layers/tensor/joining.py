"""Concatenation and stacking.

Each rank concatenates its block of the result. Along a split dimension only the parts of an operand move that belong
to another rank's block of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from distconv.dispatch import implements
from distconv.distribution import Distribution
from distconv.errors import NoRule
from distconv.grid import cached_on_grid
from distconv.layers.common.alignment import as_distributed, common_distribution, first_grid, result_shape
from distconv.layers.common.block_edges import balanced_edges, boundaries_and_cyclic, distribution_from_edges
from distconv.tensor import DistTensor


def _common_distribution(tensors: Sequence[torch.Tensor], dim: int | None = None) -> Distribution:
    """Return a distribution for operands that have the same shape except for the dimension ``dim``.

    Operands with balanced blocks take precedence.
    """
    distributed = [t for t in tensors if isinstance(t, DistTensor)]
    # Balanced operands first: the result takes their blocks, which most operators need. sorted is stable, so the first
    # of them decides, as in other operators.
    ordered = sorted(distributed, key=lambda t: bool(t.dist.boundaries or t.dist.cyclic))
    dist = common_distribution(ordered, ordered[0].shape)
    # common_distribution leaves `dim` out where operands differ in their size along it.
    if dim is not None and dist.split[dim] is None:
        axis = next((t.dist.split[dim] for t in ordered if t.dist.split[dim] not in dist.split), None)
        if axis is not None:
            dist = dist.with_axes([axis if d == dim else a for d, a in enumerate(dist.axes)])
    return dist


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[torch.Tensor], dim: int = 0, *, axis: int | None = None, out: None = None) -> DistTensor:
    """Compute ``torch.cat``; plain tensors count as replicated.

    A split ``dim`` has balanced blocks in the result.

    Parameters
    ----------
    tensors, dim, axis, out
        As in ``torch.cat``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        With ``out=``.
    """
    if out is not None:
        raise NoRule("torch.cat with out= has no distributed rule: assign the result instead")
    dim = dim if axis is None else axis
    out_shape = result_shape(torch.cat, tuple(tensors), dim)
    grid = first_grid(*tensors)
    distributed = [as_distributed(t, grid) for t in tensors]
    # torch ignores tensors of shape (0,), except for their dtype.
    operands = [t for t in distributed if tuple(t.shape) != (0,) or len(out_shape) == 1]
    dim %= len(out_shape)
    dist = _common_distribution(operands, dim)
    operand_dists, result_dist = _plan_cat(dist, dist.axes, tuple(t.shape[dim] for t in operands), dim)
    blocks = [t.redistribute(p).local for t, p in zip(operands, operand_dists, strict=True)]
    ignored = [t.local for t in distributed if tuple(t.shape) == (0,) and len(out_shape) > 1]
    return DistTensor(torch.cat(blocks + ignored, dim), result_dist, out_shape)


@cached_on_grid
def _plan_cat(
    dist: Distribution, axes: tuple[str | None, ...], extents: tuple[int, ...], dim: int
) -> tuple[list[Distribution], Distribution]:
    """Return the distributions of operands with these ``extents`` along ``dim``, and that of the result.

    Blocks of the result are balanced. Each rank takes from an operand the part that falls into its block.
    """
    edges, cyclic = boundaries_and_cyclic(dist, axes)
    axis = axes[dim]
    if axis is None:
        return [dist] * len(extents), dist
    cyclic.pop(axis, None)
    # The result is balanced. Each operand is split at the same global positions, so that blocks are joined locally.
    edges[axis] = balanced_edges(sum(extents), dist.grid.shape[axis])
    operand_dists = []
    for start, extent in zip(accumulate(extents[:-1], initial=0), extents, strict=True):
        # The result's edges, shifted to the operand's first index and cut at its ends.
        taken = tuple(min(max(e - start, 0), extent) for e in edges[axis])
        operand_dists.append(distribution_from_edges(dist.grid, axes, edges | {axis: taken}, cyclic))
    return operand_dists, distribution_from_edges(dist.grid, axes, edges, cyclic)


@implements(torch.stack)
def stack(tensors: Sequence[torch.Tensor], dim: int = 0, *, out: None = None) -> DistTensor:
    """Compute ``torch.stack``; the new dimension is replicated.

    Parameters
    ----------
    tensors, dim, out
        As in ``torch.stack``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        With ``out=``.
    """
    if out is not None:
        raise NoRule("torch.stack with out= has no distributed rule: assign the result instead")
    out_shape = result_shape(torch.stack, tuple(tensors), dim)
    dist = _common_distribution(tensors)
    dim %= len(out_shape)
    blocks = [as_distributed(t, dist.grid).redistribute(dist).local for t in tensors]
    return DistTensor(torch.stack(blocks, dim), dist.with_axes((*dist.axes[:dim], None, *dist.axes[dim:])), out_shape)


def _cat_with_added_dims(
    function: Callable[..., torch.Tensor], add_dims: Callable[..., Any], dim: int, tensors: Sequence[torch.Tensor]
) -> DistTensor:
    """Concatenate tensors along ``dim`` after ``add_dims`` has added missing dimensions."""
    result_shape(function, tuple(tensors))
    parts = [add_dims(t) for t in tensors]
    # torch.hstack concatenates vectors along their only dimension.
    return cat(parts, 0 if function is torch.hstack and parts[0].dim() == 1 else dim)


for _function, _add_dims, _dim in (
    (torch.hstack, torch.atleast_1d, 1),
    (torch.vstack, torch.atleast_2d, 0),
    (torch.dstack, torch.atleast_3d, 2),
    (torch.column_stack, lambda t: t if t.dim() > 1 else t.reshape(-1, 1), 1),
):
    implements(_function)(partial(_cat_with_added_dims, _function, _add_dims, _dim))
