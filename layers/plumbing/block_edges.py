"""Where the blocks of a split dimension begin and end, and layouts made from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distconv.distribution import Distribution, block_range
from distconv.grid import ProcessGrid
from distconv.tensor import DistTensor

Edges = tuple[int, ...]
"""Block ``i`` of a dimension owns ``[edges[i], edges[i + 1])``."""


def balanced_edges(extent: int, parts: int) -> Edges:
    """Edges of balanced blocks."""
    return (0, *(block_range(extent, parts, i).stop for i in range(parts)))


def edges_of(dist: Distribution, dim: int, extent: int) -> Edges:
    """Edges of the blocks of ``dim``, which is not block-cyclic; one block where it is not split."""
    axis = dist.split[dim]
    parts = 1 if axis is None else dist.grid.shape[axis]
    return (0, *(dist.intervals(dim, i, extent)[0].stop for i in range(parts)))


def is_cyclic(dist: Distribution, dim: int) -> bool:
    """Return True if ``dim`` is dealt out in turn, so that a block is not one range."""
    return dist.split[dim] in dist.cyclic


def layout(
    grid: ProcessGrid, axes: Sequence[str | None], edges: Mapping[str, Edges], cyclic: Mapping[str, int] | None = None
) -> Distribution:
    """Distribution with these edges along the axes that have some; edges of balanced blocks leave no trace."""
    kept = {a: e for a, e in edges.items() if a in axes and e != balanced_edges(e[-1], len(e) - 1)}
    return Distribution(grid, axes, boundaries=kept, cyclic={a: s for a, s in (cyclic or {}).items() if a in axes})


def irregular(dist: Distribution, axes: Sequence[str | None]) -> tuple[dict[str, Edges], dict[str, int]]:
    """Boundaries and block sizes that ``dist`` has along ``axes``."""
    return (
        {a: e for a, e in dist.boundaries.items() if a in axes},
        {a: s for a, s in dist.cyclic.items() if a in axes},
    )


def in_blocks(x: DistTensor, dims: Sequence[int]) -> DistTensor:
    """``x`` with those of ``dims`` gathered that are dealt out block-cyclically."""
    return x.replicated([d for d in dims if is_cyclic(x.dist, d)]) if x.dist.cyclic else x


def positions(x: DistTensor, dim: int) -> torch.Tensor:
    """Global indices of ``dim`` that this rank owns, rising."""
    owned = x.dist.intervals(dim, x.dist.coordinate(dim), x.shape[dim])
    ranges = [torch.arange(i.start, i.stop, device=x.device) for i in owned]
    return torch.cat(ranges) if len(ranges) > 1 else ranges[0] if ranges else torch.arange(0, device=x.device)
