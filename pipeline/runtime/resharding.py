"""What crosses from the grid of one stage to that of the next: intersections of boxes, known to both sides.

A boundary tensor is split as its dimensions say (N, NC, NCW, NCHW, NCDHW) over the grid of each of the two stages.
Every rank works out all boxes from the two grids and the shape; no layout is ever sent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from distconv.arrangement import Arrangement
from distconv.distribution import Box, Distribution, Interval, block_range, default_axes
from distconv.grid import ProcessGrid
from distconv.tensor import DistTensor

Extents = tuple[tuple[str, int], ...]
"""A grid as something hashable: its axes of more than one part."""


class Route(NamedTuple):
    """A box that one rank of the stage before sends to one rank of the stage after."""

    source: int
    target: int
    box: Box


def extents(grid: Arrangement) -> Extents:
    """The axes that really split something."""
    return tuple((axis, parts) for axis, parts in grid.shape.items() if parts > 1)


@lru_cache(maxsize=1024)
def blocks(grid: Extents, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """The block of every rank of a grid.

    >>> blocks((("n", 2),), (3, 5))
    ((Interval(start=0, stop=2), Interval(start=0, stop=5)), (Interval(start=2, stop=3), Interval(start=0, stop=5)))
    """
    arranged = Arrangement(**dict(grid))
    axes = default_axes(None, len(shape)) if grid else (None,) * len(shape)
    found = []
    for rank in range(arranged.size):
        coords = arranged.coords_of(rank)
        ranges = (
            block_range(n, arranged.shape[axis], coords[axis]) if axis else range(n)
            for n, axis in zip(shape, axes, strict=True)
        )
        found.append(tuple(Interval(block.start, block.stop) for block in ranges))
    return tuple(found)


@lru_cache(maxsize=1024)
def routes(source: Extents, target: Extents, shape: tuple[int, ...]) -> tuple[Route, ...]:
    """What each rank of ``source`` sends to each rank of ``target``, so that each target's block is filled once.

    Where several sources hold the same block they take the targets in turn.
    """
    owners: dict[Box, list[int]] = {}
    for rank, box in enumerate(blocks(source, shape)):
        owners.setdefault(box, []).append(rank)
    found = []
    for target_rank, wanted in enumerate(blocks(target, shape)):
        for box, ranks in owners.items():
            both = tuple(one.intersect(two) for one, two in zip(box, wanted, strict=True))
            if all(interval.extent for interval in both):
                found.append(Route(ranks[target_rank % len(ranks)], target_rank, both))
    return tuple(found)


def within(box: Box, block: Box) -> tuple[slice, ...]:
    """``box`` as slices of the tensor that holds ``block``."""
    return tuple(slice(b.start - o.start, b.stop - o.start) for b, o in zip(box, block, strict=True))


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
