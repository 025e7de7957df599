"""``select_grid``: the fastest grid of samples and space that fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from distconv.arrangement import Arrangement
from distconv.errors import PlanError
from distconv.layers.sparse.partition import COLUMNS
from distconv.parameters.channel_split import divisors
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.sparse.recording import SparseRecording
from distconv.perfmodel.sparse.site_costs import SitePrediction, predict


@dataclass(frozen=True)
class GridChoice:
    """Fastest grid that fits, and all grids that were considered.

    Attributes
    ----------
    best : SitePrediction
    ranking : tuple of SitePrediction
        All grids, fastest first, those that exceed the memory included.
    """

    best: SitePrediction
    ranking: tuple[SitePrediction, ...]


def select_grid(
    recording: SparseRecording, machine: Machine, ranks: int, memory: float | None = None, *, optimizer_slots: int = 1
) -> GridChoice:
    """Choose how ranks split samples and space, for the least time within a memory limit.

    All layers are on one grid. Grids with more parts along n than the example has samples are not considered.

    Parameters
    ----------
    recording : SparseRecording
    machine : Machine
    ranks : int
        Number of ranks.
    memory : float, optional
        Limit in bytes per rank. Default: none.
    optimizer_slots : int
        Tensors of optimizer state per parameter.

    Returns
    -------
    GridChoice

    Raises
    ------
    PlanError
        If no grid fits into ``memory``; the message gives the smallest limit that works.
    """
    choices = [
        predict(recording, machine, grid, optimizer_slots=optimizer_slots)
        for grid in _grids(ranks, recording.dimension, recording.batch_size)
    ]
    ranking = tuple(sorted(choices, key=lambda each: each.time))
    best = next((each for each in ranking if memory is None or each.memory <= memory), None)
    if best is None:
        assert memory is not None
        least = min(ranking, key=lambda each: each.memory)
        raise PlanError(
            f"no grid of {ranks} ranks fits into {memory / 1e9:.4g} GB per rank; the smallest limit that works is "
            f"{least.memory / 1e9:.4g} GB ({least.grid.describe()}); use more ranks, smaller batches or fewer points"
        )
    return GridChoice(best, ranking)


def _grids(ranks: int, dimension: int, samples: int) -> Iterator[Arrangement]:
    # Samples cannot be cut, so there are at most as many parts along n.
    axes = [axis for axis in COLUMNS[dimension] if axis]
    for parts in itertools.product(divisors(ranks), repeat=len(axes)):
        if math.prod(parts) == ranks and parts[0] <= samples:
            yield Arrangement(**dict(zip(axes, parts, strict=True)))
