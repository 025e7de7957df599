"""Split points chosen for one schedule: the least time of a mini-batch within its memory, between layers.

1. For several weights of a transfer (``TRANSFER_WEIGHTS``), find the split points that fit and whose slowest stage has
   the least cost: its computation plus the weight times its two transfers. The dynamic program is exact for this cost.
   A weight of 0 balances computation; larger ones prefer small boundaries.
2. From each of these and from the given split points, move single ones any distance while that makes the mini-batch
   faster.

Step 1 is exact for another cost than the time of the mini-batch, and step 2 stops where no single move helps. Of the
300 random networks of 9 layers on 2 to 4 devices in ``tests/perfmodel/exploration/test_cuts.py``, 216 fit their memory.
For 212 of them the result is the best of all split points; for the other four it is up to 1.9 % slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distconv.perfmodel.exploration.candidate_stages import PipelineCandidate, round_to_layers
from distconv.perfmodel.stages.dynamic_program import StageMove, cheapest_stages, fixed_moves
from distconv.perfmodel.stages.stage_costs import Array, StageRange

TRANSFER_WEIGHTS = (0.0, 0.5, 1.0, 2.0)
"""Weights of a transfer relative to computation, each of which gives a start for step 2."""


def best_cuts(stages: PipelineCandidate, initial: Sequence[Sequence[float]] = ()) -> list[int]:
    """Return the best split points found; if none fit the memory, those that come closest.

    Parameters
    ----------
    stages : PipelineCandidate
        Pipelines to split.
    initial : sequence of sequence of float
        Split points to start from.

    Returns
    -------
    list of int
    """
    # Sorted below, so that the result does not depend on the order of a set.
    starts = {tuple(round_to_layers(positions, stages.size)) for positions in initial}
    starts |= {
        tuple(balanced) for weight in TRANSFER_WEIGHTS if (balanced := balanced_cuts(stages, weight)) is not None
    }
    starts = starts or {tuple(least_memory_cuts(stages))}
    return min(
        (_improve(stages, list(start)) for start in sorted(starts)), key=lambda cuts: excess_and_time(stages, cuts)
    )


def excess_and_time(stages: PipelineCandidate, cuts: Sequence[int]) -> tuple[float, float]:
    """Return the bytes beyond the memory, summed over stages, then the seconds. The search minimizes this pair.

    Parameters
    ----------
    stages : PipelineCandidate
    cuts : sequence of int

    Returns
    -------
    tuple of float
    """
    over = sum(max(0.0, a - b) for a, b in zip(stages.memory(cuts), stages.memory_limits, strict=True))
    return over, stages.time(cuts)


def balanced_cuts(stages: PipelineCandidate, transfer_weight: float = 0.0) -> list[int] | None:
    """Return the split points whose slowest stage takes least among those that fit.

    Parameters
    ----------
    stages : PipelineCandidate
    transfer_weight : float
        Weight of the two transfers of each stage.

    Returns
    -------
    list of int or None
        None if none fit.
    """
    terms = stages.context.layer_sums
    sent = transfer_weight * terms.boundary_time(terms.edges, 1)
    first, last = terms.edges[:, None], terms.edges[None, :]

    def work(move: StageMove) -> Array:
        index = move.before[0]
        # The slowest of the devices that hold replicas of this stage.
        kinds = stages.context.kinds[index :: stages.count]
        seconds = np.maximum.reduce([terms.sum_between(terms.seconds[kind], first, last) for kind in kinds])
        seconds = seconds + sent[:, None] + sent[None, :]
        return np.where(stages.stage_bytes(index, first, last) <= stages.memory_limits[index], seconds, np.inf)

    return _cuts(cheapest_stages(stages.size, _moves(stages), work, lambda move: np.zeros(stages.size + 1)))


def least_memory_cuts(stages: PipelineCandidate) -> list[int]:
    """Return the split points with the least memory on the stage that fills its devices most.

    Memory counts as a fraction of the devices' memory. If these split points do not fit, none do.
    """
    edges = stages.context.layer_sums.edges
    emptiest = cheapest_stages(
        stages.size,
        _moves(stages),
        lambda move: (
            stages.stage_bytes(move.before[0], edges[:, None], edges[None, :]) / stages.memory_limits[move.before[0]]
        ),
        lambda move: np.zeros(stages.size + 1),
    )
    cuts = _cuts(emptiest)
    assert cuts is not None  # there are at least as many layers as stages
    return cuts


def _moves(stages: PipelineCandidate) -> list[StageMove]:
    return fixed_moves([(1,)] * stages.count)


def _cuts(chosen: Sequence[StageRange] | None) -> list[int] | None:
    return None if chosen is None else [int(stage.first) for stage in chosen[1:]]


def _improve(stages: PipelineCandidate, cuts: list[int]) -> list[int]:
    best, value = cuts, excess_and_time(stages, cuts)
    # Each step takes the best of all single moves. The value decreases strictly, so the loop ends.
    while True:
        edges = [0, *best, stages.size]
        moved = [
            [*best[:index], cut, *best[index + 1 :]]
            for index in range(len(best))
            for cut in range(edges[index] + 1, edges[index + 2])
            if cut != best[index]
        ]
        nearest, nearest_cuts = min(((excess_and_time(stages, cuts), cuts) for cuts in moved), default=(value, best))
        if nearest >= value:
            return best
        best, value = nearest_cuts, nearest
