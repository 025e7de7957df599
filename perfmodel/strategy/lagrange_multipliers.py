"""Multipliers: weights of sums with which their additive minimum comes closest to the minimum of their maximum.

With weights that add up to one over the sums to be minimised, and any weights >= 0 over those that may not pass zero,
the least weighted sum is a lower bound of the best choice. It is a concave function of the weights; each choice gives a
plane above it, and a small linear program over the planes tells where it may still be larger. Asking there makes the
weights jump, so the next question lies between there and the best weights known.

Source: L. Lasdon, Optimization theory for large systems, 1970; P. Wentges, Weighted Dantzig-Wolfe decomposition, 1997.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import linprog

from distconv.perfmodel.cost.cost_tables import Array, Choices
from distconv.perfmodel.strategy.bucket_elimination import Elimination, Relaxation

STEP = 0.3
"""How far from the best weights towards the linear program's the next question is asked."""

ACCURACY = 1e-4
"""Relative distance of the bound from what any weights can give."""

PATIENCE = 12
"""Rounds without a better bound, as there are where buckets are split: planes are of whole choices, so above it."""

LARGEST = 100.0
"""Bound of the weight of a sum that may not pass zero, in which the linear program stays bounded."""


def best_weights(
    elimination: Elimination,
    weights: Array,
    rounds: int,
    finished: Callable[[float], bool],
    report: Callable[[Choices], None],
) -> Array:
    """Weights better than ``weights``, up to ``ACCURACY`` the best.

    Every choice met goes to ``report``; ``finished(bound)``, asked in every round, may end it early. The
    sums should be of the order of one.
    """
    best = elimination.run(weights)
    planes = [_plane(best, report)]
    patience = PATIENCE
    for _ in range(rounds):
        target, ceiling = _highest(np.array(planes), elimination.sums.objective)
        if finished(best.bound) or ceiling - best.bound <= ACCURACY * abs(ceiling) or not patience:
            break
        asked = weights + STEP * (target - weights)
        relaxation = elimination.run(asked)
        planes.append(_plane(relaxation, report))
        patience = PATIENCE if relaxation.bound > best.bound + ACCURACY * abs(best.bound) else patience - 1
        if relaxation.bound > best.bound:
            weights, best = asked, relaxation
    return weights


def _plane(relaxation: Relaxation, report: Callable[[Choices], None]) -> Array:
    choices = relaxation.choices()
    report(choices)
    return relaxation.elimination.sums.values(choices)


def _highest(planes: Array, objective: int) -> tuple[Array, float]:
    """Weights at which the lowest plane (planes, rows) is highest, and its height there."""
    count, rows = planes.shape
    matrix = np.concatenate([-planes, np.ones((count, 1))], axis=1)
    goal = np.zeros(rows + 1)
    goal[-1] = -1
    adds_up = (np.arange(rows + 1) < objective).astype(np.float64)[None]
    bounds = [(0, 1)] * objective + [(0, LARGEST)] * (rows - objective) + [(None, None)]
    result = linprog(goal, matrix, np.zeros(count), adds_up, np.ones(1), bounds, method="highs")
    weights = np.clip(result.x[:-1], 0, None)
    weights[:objective] /= weights[:objective].sum()
    return weights, float(-result.fun)
