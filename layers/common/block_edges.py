"""Edges of the blocks of a split dimension, and distributions made from edges.

Called by operators that shape, join, slice and index tensors (``layers.tensor``) and by matrix products. Their results
keep the input's blocks, balanced or not, wherever these exist in the result. Only :func:`gather_cyclic_dims`
communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distconv.distribution import Distribution, block_range
from distconv.grid import ProcessGrid
from distconv.tensor import DistTensor

Edges = tuple[int, ...]
"""Edges of a dimension's blocks. Block ``i`` owns ``[edges[i], edges[i + 1])``."""


def balanced_edges(extent: int, parts: int) -> Edges:
    """Return the edges of balanced blocks.

    Parameters
    ----------
    extent : int
        Number of indices of the dimension.
    parts : int
        Number of blocks.

    Returns
    -------
    tuple of int
        ``parts + 1`` edges.
    """
    return (0, *(block_range(extent, parts, i).stop for i in range(parts)))


def edges_of(dist: Distribution, dim: int, extent: int) -> Edges:
    """Return the edges of the blocks of a dimension.

    Parameters
    ----------
    dist : Distribution
    dim : int
        A dimension that is not block-cyclic.
    extent : int
        Its global size.

    Returns
    -------
    tuple of int
        ``(0, extent)`` if the dimension is not split.
    """
    axis = dist.split[dim]
    parts = 1 if axis is None else dist.grid.shape[axis]
    return (0, *(dist.intervals(dim, i, extent)[0].stop for i in range(parts)))


def is_cyclic(dist: Distribution, dim: int) -> bool:
    """Return True if ``dim`` is distributed block-cyclically, so that the indices of a rank are not one range.

    Parameters
    ----------
    dist : Distribution
    dim : int
    """
    return dist.split[dim] in dist.cyclic


def distribution_from_edges(
    grid: ProcessGrid, axes: Sequence[str | None], edges: Mapping[str, Edges], cyclic: Mapping[str, int] | None = None
) -> Distribution:
    """Return the distribution with given edges.

    Parameters
    ----------
    grid : ProcessGrid
    axes : sequence of str or None
        The axis that splits each dimension.
    edges : mapping of str to tuple of int
        Edges along some axes. Edges of balanced blocks are omitted from the distribution, so that it equals the default
        one.
    cyclic : mapping of str to int, optional
        Block sizes of block-cyclic axes.

    Returns
    -------
    Distribution
        Entries of ``edges`` and ``cyclic`` for axes outside ``axes`` are ignored.
    """
    # Balanced edges are left out, so that equal distributions compare equal and share cached plans.
    boundaries = {a: e for a, e in edges.items() if a in axes and e != balanced_edges(e[-1], len(e) - 1)}
    return Distribution(
        grid, axes, boundaries=boundaries, cyclic={a: s for a, s in (cyclic or {}).items() if a in axes}
    )


def boundaries_and_cyclic(dist: Distribution, axes: Sequence[str | None]) -> tuple[dict[str, Edges], dict[str, int]]:
    """Return the boundaries and the block-cyclic block sizes of a distribution along some axes.

    Parameters
    ----------
    dist : Distribution
    axes : sequence of str or None

    Returns
    -------
    tuple of dict and dict
        The entries of ``dist.boundaries`` and of ``dist.cyclic`` for ``axes``.
    """
    return (
        {a: e for a, e in dist.boundaries.items() if a in axes},
        {a: s for a, s in dist.cyclic.items() if a in axes},
    )


def gather_cyclic_dims(x: DistTensor, dims: Sequence[int]) -> DistTensor:
    """Return a tensor with the block-cyclic ones among some dimensions gathered.

    Collective: call on every rank.

    Parameters
    ----------
    x : DistTensor
    dims : sequence of int
        Dimensions that must not be block-cyclic in the result.

    Returns
    -------
    DistTensor
        ``x`` itself if none of its dimensions is block-cyclic.
    """
    return x.replicated([d for d in dims if is_cyclic(x.dist, d)]) if x.dist.cyclic else x


def owned_indices(x: DistTensor, dim: int) -> torch.Tensor:
    """Return the global indices of a dimension that this rank owns.

    Parameters
    ----------
    x : DistTensor
    dim : int

    Returns
    -------
    Tensor
        int64, ascending, on the device of ``x``.
    """
    # Several ranges if the dimension is block-cyclic, and none if the rank owns nothing of it.
    owned = x.dist.intervals(dim, x.dist.coordinate(dim), x.shape[dim])
    ranges = [torch.arange(i.start, i.stop, device=x.device) for i in owned]
    return torch.cat(ranges) if len(ranges) > 1 else ranges[0] if ranges else torch.arange(0, device=x.device)
