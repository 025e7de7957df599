"""Lagrange multipliers: weights of the sums whose additive minimum is the largest lower bound.

Weights add up to one over the sums to be minimized; weights of constrained sums are any numbers >= 0. For all such
weights, the least weighted sum is a lower bound of the best choice. It is a concave function of the weights. Each
choice gives a plane above it, and a linear program over the planes finds the weights with the highest possible bound.
Evaluating there would make the weights oscillate, so the next weights lie between these and the best known ones.

Source: L. Lasdon, Optimization theory for large systems, 1970; P. Wentges, Weighted Dantzig-Wolfe decomposition, 1997.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import linprog

from distconv.perfmodel.cost.cost_tables import Array, Choices
from distconv.perfmodel.strategy.bucket_elimination import Elimination, Relaxation

STEP = 0.3
"""Step from the best weights towards those of the linear program."""

ACCURACY = 1e-4
"""Relative distance of the bound from what any weights can give."""

PATIENCE = 12
"""Rounds without a better bound before the iteration stops.

Such rounds occur if buckets are split: the planes are those of consistent choices and lie above the bound.
"""

LARGEST = 100.0
"""Upper bound of the weight of a constrained sum, which keeps the linear program bounded."""


def best_weights(
    elimination: Elimination,
    weights: Array,
    rounds: int,
    finished: Callable[[float], bool],
    report: Callable[[Choices], None],
) -> Array:
    """Improve weights until their bound is the largest up to ``ACCURACY``.

    Parameters
    ----------
    elimination : Elimination
        With sums of the order of one.
    weights : array
        Weights to start from, one per sum.
    rounds : int
        Most rounds.
    finished : callable
        ``finished(bound)`` is called in every round and returns True to stop.
    report : callable
        Called with every choice that is found.

    Returns
    -------
    array
        The best weights.
    """
    best = elimination.run(weights)
    planes = [_plane(best, report)]
    patience = PATIENCE
    for _ in range(rounds):
        # `ceiling` is above every bound, because each plane is. The iteration ends when both meet.
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
    """Return the weights at which the lowest plane (planes, rows) is highest, and its height there."""
    count, rows = planes.shape
    # Unknowns: the weights, and a height that is at most that of each plane. linprog minimizes, hence -1.
    matrix = np.concatenate([-planes, np.ones((count, 1))], axis=1)
    goal = np.zeros(rows + 1)
    goal[-1] = -1
    adds_up = (np.arange(rows + 1) < objective).astype(np.float64)[None]
    bounds = [(0, 1)] * objective + [(0, LARGEST)] * (rows - objective) + [(None, None)]
    result = linprog(goal, matrix, np.zeros(count), adds_up, np.ones(1), bounds, method="highs")
    # The solver's tolerance permits slightly negative weights, for which the bound would not hold.
    weights = np.clip(result.x[:-1], 0, None)
    weights[:objective] /= weights[:objective].sum()
    return weights, float(-result.fun)
