"""What crosses from the grid of one stage to that of the next.

A boundary tensor is split as its dimensions say (N, NC, NCW, NCHW, NCDHW) over the grid of each of the two stages.
Every rank works out who sends what to whom from the two grids and the shape; no layout is ever sent.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from distconv.arrangement import Arrangement
from distconv.communication.routes import Routes
from distconv.distribution import Distribution, default_axes
from distconv.grid import ProcessGrid
from distconv.tensor import DistTensor


@lru_cache(maxsize=1024)
def boundary_routes(
    source: Arrangement, target: Arrangement, shape: tuple[int, ...], rank: int, *, sources: range, targets: range
) -> Routes:
    """What ``rank`` sends or receives of a boundary tensor between the ranks of two stages' grids."""
    src, dst = (_split_by_dimensions(grid, len(shape)) for grid in (source, target))
    return Routes(src, dst, shape, rank, sources=sources, targets=targets)


def _split_by_dimensions(grid: Arrangement, dims: int) -> Distribution[Arrangement]:
    return Distribution(grid, default_axes(None, dims) if grid.size > 1 else (None,) * dims)


def to_boundary(value: torch.Tensor, grid: ProcessGrid | None) -> torch.Tensor:
    """``value`` split as a boundary tensor is; part of the graph. Collective over ``grid`` (None: one rank)."""
    if grid is None:
        return value
    if not isinstance(value, DistTensor):
        # The same on every rank, as after gather(): each keeps its block.
        value = DistTensor(value, Distribution(grid, (None,) * value.dim()), value.shape)
    return value.redistribute(Distribution(grid, default_axes(None, value.dim())))


def from_boundary(local: torch.Tensor, shape: tuple[int, ...], grid: ProcessGrid | None) -> torch.Tensor:
    """A boundary tensor of the global ``shape`` of which this rank has ``local``."""
    return local if grid is None else DistTensor(local, Distribution(grid, default_axes(None, len(shape))), shape)


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's block of a boundary tensor, on which autograd works."""
    return value.local if isinstance(value, DistTensor) else value
