"""Helpers of the tests of the core: grids without MPI, grids over all ranks, and blocks by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.arrangement import Arrangement

_grids: dict[tuple[Any, ...], dc.ProcessGrid] = {}


class OnPaper(Arrangement):
    """An arrangement as one of its ranks sees it; it has no communicator."""

    coords: dict[str, int] = {}  # noqa: RUF012


def grid_on_paper(rank: int = 0, **axes: int) -> OnPaper:
    """A grid for arithmetic alone, as ``rank`` of it sees it."""
    grid = OnPaper(**axes)
    grid.coords = grid.coords_of(rank)
    return grid


def grid_over(comm: MPI.Intracomm, **axes: int) -> dc.ProcessGrid:
    """The grid of these extents over ``comm``, made once."""
    key = (comm.handle, *sorted(axes.items()))
    if key not in _grids:
        _grids[key] = dc.ProcessGrid(comm, **axes)
    return _grids[key]


def grids(comm: MPI.Intracomm, axes: str) -> list[dc.ProcessGrid]:
    """All ranks along one of ``axes`` (each of them, up to 4 ranks), and two along one with the rest along another."""
    size = comm.size
    alone = [{axis: size} for axis in (axes if 1 < size <= 4 else axes[-1:])]
    pairs = itertools.combinations(axes, 2) if size > 2 and size % 2 == 0 else ()
    return [grid_over(comm, **each) for each in (*alone, *({a: 2, b: size // 2} for a, b in pairs))]


def cut(whole: torch.Tensor, dist: dc.Distribution) -> torch.Tensor:
    """This rank's block of ``whole`` under ``dist``, index by index."""
    for dim, extent in enumerate(whole.shape):
        owned = dist.intervals(dim, dist.coordinate(dim), extent)
        index = [i for interval in owned for i in range(interval.start, interval.stop)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return whole


def counting(*shape: int) -> torch.Tensor:
    """A tensor whose every element is another number."""
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers in float64, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def raises_everywhere(
    comm: MPI.Intracomm, error: type[Exception], match: str, call: Callable[[], object], same_text: bool = True
) -> str:
    """Check that ``call`` raises on all ranks, with the same text, and that ``comm`` works afterwards."""
    with pytest.raises(error, match=match) as caught:
        call()
    texts = comm.allgather(str(caught.value))
    if same_text:
        assert len(set(texts)) == 1, texts
    assert comm.allreduce(1) == comm.size
    return texts[0]


def twenty_layouts(comm: MPI.Intracomm, shape: Sequence[int]) -> list[dc.Distribution]:
    """Layouts of a 3-D tensor: several grids, axes in any order, balanced, uneven, cyclic, partly or all replicated."""
    found: dict[dc.Distribution, None] = {}
    size = comm.size
    parts = 2 if size % 2 == 0 else size
    first, second = grid_over(comm, n=size), grid_over(comm, h=parts, w=size // parts)
    third, fourth = grid_over(comm, n=parts, d=size // parts), grid_over(comm, w=size)
    for grid, axes in (
        (first, ("n", None, None)),
        (first, (None, "n", None)),
        (first, (None, None, None)),
        (second, (None, "h", "w")),
        (second, ("w", None, "h")),
        (second, ("h", None, None)),
        (third, ("n", "d", None)),
        (third, (None, "n", "d")),
        (third, (None, None, "d")),
        (fourth, (None, None, "w")),
    ):
        found.setdefault(dc.Distribution(grid, axes))
        split = [(axis, extent) for axis, extent in zip(axes, shape, strict=True) if axis]
        if split:
            axis, extent = split[-1]
            bounds = sorted((7 * i * i) % (extent + 1) for i in range(1, grid.shape[axis]))
            found.setdefault(dc.Distribution(grid, axes, boundaries={axis: (0, *bounds, extent)}))
            axis, _ = split[0]
            found.setdefault(dc.Distribution(grid, axes, cyclic={axis: 1 + len(found) % 3}))
    return list(found)[:20]
