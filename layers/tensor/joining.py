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
from distconv.layers.common.alignment import as_distributed, common_distribution, result_shape
from distconv.layers.common.block_edges import balanced_edges, irregular, layout
from distconv.tensor import DistTensor


def _common(tensors: Sequence[torch.Tensor], joined: int | None = None) -> Distribution:
    """Return a distribution for operands that have the same shape except for the dimension ``joined``.

    Operands with balanced blocks take precedence.
    """
    distributed = [t for t in tensors if isinstance(t, DistTensor)]
    ordered = sorted(distributed, key=lambda t: bool(t.dist.boundaries or t.dist.cyclic))
    dist = common_distribution(ordered, ordered[0].shape)
    if joined is not None and dist.split[joined] is None:
        axis = next((t.dist.split[joined] for t in ordered if t.dist.split[joined] not in dist.split), None)
        if axis is not None:
            dist = dist.with_axes([axis if d == joined else a for d, a in enumerate(dist.axes)])
    return dist


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[torch.Tensor], dim: int = 0, *, axis: int | None = None, out: None = None) -> DistTensor:
    """Compute ``torch.cat``; plain tensors count as replicated.

    A split ``dim`` has balanced blocks in the result. Parameters as in torch.

    Raises
    ------
    NoRule
        With ``out=``.
    """
    if out is not None:
        raise NoRule("torch.cat with out=: assign the result instead")
    dim = dim if axis is None else axis
    out_shape = result_shape(torch.cat, tuple(tensors), dim)
    grid = next(t.grid for t in tensors if isinstance(t, DistTensor))
    given = [as_distributed(t, grid) for t in tensors]
    # torch ignores tensors of shape (0,), except for their dtype.
    operands = [t for t in given if tuple(t.shape) != (0,) or len(out_shape) == 1]
    dim %= len(out_shape)
    dist = _common(operands, dim)
    places, joined = _joining(dist, dist.axes, tuple(t.shape[dim] for t in operands), dim)
    blocks = [t.redistribute(p).local for t, p in zip(operands, places, strict=True)]
    passed_over = [t.local for t in given if tuple(t.shape) == (0,) and len(out_shape) > 1]
    return DistTensor(torch.cat(blocks + passed_over, dim), joined, out_shape)


@cached_on_grid
def _joining(
    dist: Distribution, axes: tuple[str | None, ...], extents: tuple[int, ...], dim: int
) -> tuple[list[Distribution], Distribution]:
    """Return the distributions of operands with these ``extents`` along ``dim``, and that of the result.

    Blocks of the result are balanced. Each rank takes from an operand the part that falls into its block.
    """
    edges, cyclic = irregular(dist, axes)
    axis = axes[dim]
    if axis is None:
        return [dist] * len(extents), dist
    cyclic.pop(axis, None)
    edges[axis] = balanced_edges(sum(extents), dist.grid.shape[axis])
    places = []
    for start, extent in zip(accumulate(extents[:-1], initial=0), extents, strict=True):
        taken = tuple(min(max(e - start, 0), extent) for e in edges[axis])
        places.append(layout(dist.grid, axes, edges | {axis: taken}, cyclic))
    return places, layout(dist.grid, axes, edges, cyclic)


@implements(torch.stack)
def stack(tensors: Sequence[torch.Tensor], dim: int = 0, *, out: None = None) -> DistTensor:
    """Compute ``torch.stack``; the new dimension is replicated. Parameters as in torch.

    Raises
    ------
    NoRule
        With ``out=``.
    """
    if out is not None:
        raise NoRule("torch.stack with out=: assign the result instead")
    out_shape = result_shape(torch.stack, tuple(tensors), dim)
    dist = _common(tensors)
    dim %= len(out_shape)
    blocks = [as_distributed(t, dist.grid).redistribute(dist).local for t in tensors]
    return DistTensor(torch.stack(blocks, dim), dist.with_axes((*dist.axes[:dim], None, *dist.axes[dim:])), out_shape)


def _joined(
    function: Callable[..., torch.Tensor], grown: Callable[..., Any], dim: int, tensors: Sequence[torch.Tensor]
) -> DistTensor:
    """Concatenate tensors along ``dim`` after ``grown`` has added missing dimensions."""
    result_shape(function, tuple(tensors))
    parts = [grown(t) for t in tensors]
    return cat(parts, 0 if function is torch.hstack and parts[0].dim() == 1 else dim)


def _as_column(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() > 1 else tensor.reshape(-1, 1)


for _function, _grown, _dim in (
    (torch.hstack, torch.atleast_1d, 1),
    (torch.vstack, torch.atleast_2d, 0),
    (torch.dstack, torch.atleast_3d, 2),
    (torch.column_stack, _as_column, 1),
):
    implements(_function)(partial(_joined, _function, _grown, _dim))
