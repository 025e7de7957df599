"""Split points chosen for one schedule: the least time of a mini-batch within its memory, between layers.

1. For several prices of a transfer, find the split points whose slowest stage takes least among those that fit. A stage
   counts with its two transfers, weighted by that price. The dynamic program is exact for it. A price of 0 balances
   computation; larger ones prefer small boundaries.
2. From each of these and from the given split points, move single ones any distance while that makes the mini-batch
   faster.

Step 1 is exact for another cost than the time of the mini-batch, and step 2 stops where no single move helps. Of the
300 random networks of 9 layers on 2 to 4 devices in ``tests/perfmodel/exploration/test_cuts.py``, 216 fit their memory.
For 212 of them the result is the best of all split points; for the other four it is up to 1.9 % slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distconv.perfmodel.exploration.candidate_stages import Stages, whole
from distconv.perfmodel.stages.dynamic_program import Move, chain, cheapest
from distconv.perfmodel.stages.stage_costs import Array, StageRange

PRICES = (0.0, 0.5, 1.0, 2.0)


def best_cuts(stages: Stages, given: Sequence[Sequence[float]] = ()) -> list[int]:
    """Return the best split points found; if none fit the memory, those that come closest.

    Parameters
    ----------
    stages : Stages
        Pipelines to split.
    given : sequence of sequence of float
        Split points to start from.

    Returns
    -------
    list of int
    """
    starts = {tuple(whole(positions, stages.size)) for positions in given}
    starts |= {tuple(balanced) for price in PRICES if (balanced := balanced_cuts(stages, price)) is not None}
    starts = starts or {tuple(emptiest_cuts(stages))}
    return min((_improved(stages, list(start)) for start in sorted(starts)), key=lambda cuts: key(stages, cuts))


def key(stages: Stages, cuts: Sequence[int]) -> tuple[float, float]:
    """Return the bytes beyond the memory, summed over stages, then the seconds. The search minimizes this pair.

    Parameters
    ----------
    stages : Stages
    cuts : sequence of int

    Returns
    -------
    tuple of float
    """
    over = sum(max(0.0, a - b) for a, b in zip(stages.memory(cuts), stages.rooms, strict=True))
    return over, stages.time(cuts)


def balanced_cuts(stages: Stages, price: float = 0.0) -> list[int] | None:
    """Return the split points whose slowest stage takes least among those that fit.

    Parameters
    ----------
    stages : Stages
    price : float
        Weight of the two transfers of each stage.

    Returns
    -------
    list of int or None
        None if none fit.
    """
    terms = stages.setting.terms
    sent = price * terms.boundary(terms.edges, 1)
    first, last = terms.edges[:, None], terms.edges[None, :]

    def work(move: Move) -> Array:
        index = move.before[0]
        kinds = stages.setting.kinds[index :: stages.count]
        seconds = np.maximum.reduce([terms.between(terms.seconds[kind], first, last) for kind in kinds])
        seconds = seconds + sent[:, None] + sent[None, :]
        return np.where(stages.needed(index, first, last) <= stages.rooms[index], seconds, np.inf)

    return _cuts(cheapest(stages.size, _moves(stages), work, lambda move: np.zeros(stages.size + 1)))


def emptiest_cuts(stages: Stages) -> list[int]:
    """Return the split points whose fullest stage fills its devices least: if these do not fit, none do."""
    edges = stages.setting.terms.edges
    emptiest = cheapest(
        stages.size,
        _moves(stages),
        lambda move: stages.needed(move.before[0], edges[:, None], edges[None, :]) / stages.rooms[move.before[0]],
        lambda move: np.zeros(stages.size + 1),
    )
    cuts = _cuts(emptiest)
    assert cuts is not None  # there are at least as many layers as stages
    return cuts


def _moves(stages: Stages) -> list[Move]:
    return chain([(1,)] * stages.count)


def _cuts(chosen: Sequence[StageRange] | None) -> list[int] | None:
    return None if chosen is None else [int(stage.first) for stage in chosen[1:]]


def _improved(stages: Stages, cuts: list[int]) -> list[int]:
    best, value = cuts, key(stages, cuts)
    while True:
        edges = [0, *best, stages.size]
        moved = [
            [*best[:index], cut, *best[index + 1 :]]
            for index in range(len(best))
            for cut in range(edges[index] + 1, edges[index + 2])
            if cut != best[index]
        ]
        nearest, nearest_cuts = min(((key(stages, cuts), cuts) for cuts in moved), default=(value, best))
        if nearest >= value:
            return best
        best, value = nearest_cuts, nearest
