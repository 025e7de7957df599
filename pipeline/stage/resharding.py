"""Boundary tensors: from the grid of one stage to that of the next.

A boundary tensor is split by its dimensions (N, NC, NCW, NCHW, NCDHW) over the grid of each of the two stages. Every
rank computes who sends what to whom from both grids and the shape; layouts are never sent.
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
    """Return what a rank sends or receives of a boundary tensor between two stages.

    Parameters
    ----------
    source, target : Arrangement
        Grids of the sending and the receiving stage.
    shape : tuple of int
        Global shape.
    rank : int
        This rank.
    sources, targets : range
        Ranks of the two grids.

    Returns
    -------
    Routes
    """
    dims = len(shape)
    src, dst = (
        Distribution(grid, default_axes(None, dims) if grid.size > 1 else (None,) * dims) for grid in (source, target)
    )
    return Routes(src, dst, shape, rank, sources=sources, targets=targets)


def to_boundary(value: torch.Tensor, grid: ProcessGrid | None) -> torch.Tensor:
    """Return a tensor redistributed as a boundary tensor. Collective: call on every rank.

    The redistribution is part of the autograd graph.

    Parameters
    ----------
    value : Tensor
        Output of a stage. A plain tensor is identical on all ranks of the grid.
    grid : ProcessGrid or None
        Grid of the stage; None for one rank.

    Returns
    -------
    Tensor
    """
    if grid is None:
        return value
    if not isinstance(value, DistTensor):
        # Identical on every rank, as after gather(): each rank keeps its block.
        value = DistTensor(value, Distribution(grid, (None,) * value.dim()), value.shape)
    # Sender and receiver assume this distribution, so that a message need not describe it.
    return value.redistribute(Distribution(grid, default_axes(None, value.dim())))


def from_boundary(local: torch.Tensor, shape: tuple[int, ...], grid: ProcessGrid | None) -> torch.Tensor:
    """Return the boundary tensor of which this rank has a block.

    Parameters
    ----------
    local : Tensor
        Block of this rank.
    shape : tuple of int
        Global shape.
    grid : ProcessGrid or None
        Grid of the stage; None for one rank.

    Returns
    -------
    Tensor
    """
    return local if grid is None else DistTensor(local, Distribution(grid, default_axes(None, len(shape))), shape)


def local_block(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's block of a boundary tensor, on which autograd operates."""
    return value.local if isinstance(value, DistTensor) else value
