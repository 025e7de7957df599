"""Weights against the best ones, from a linear program over every choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from distconv.perfmodel.strategy.bucket_elimination import Elimination, decision_order
from distconv.perfmodel.strategy.lagrange_multipliers import best_weights
from tests.perfmodel.strategy.problems import random_problem

SIZES = (3, 2, 4, 2, 3)


def elimination_of(sums):
    return Elimination(sums, decision_order(sums))


def every_value(problem, sums):
    return sums.values(np.array(list(itertools.product(*map(range, problem.sizes)))))


def best_bound(values):
    """The most that the least weighted sum can be, over all weights that add up to one."""
    count, rows = values.shape
    matrix = np.column_stack([-values, np.ones(count)])
    goal = [0.0] * rows + [-1.0]
    found = linprog(goal, matrix, np.zeros(count), [[1.0] * rows + [0.0]], [1.0], [(0, 1)] * rows + [(None, None)])
    return -found.fun


def uniform(sums):
    return np.full(len(sums.rows), 1 / len(sums.rows))


def test_the_bound_is_that_of_the_best_weights():
    improved = 0
    for seed in range(25):
        problem = random_problem(seed, SIZES, allreduces=1.2)
        sums = problem.time_sums()
        elimination, values = elimination_of(sums), every_value(problem, sums)
        met: list[np.ndarray] = []
        weights = best_weights(elimination, uniform(sums), 300, lambda bound: False, met.append)
        bound, best = float((values @ weights).min()), best_bound(values)
        assert weights.sum() == pytest.approx(1) and (weights >= 0).all()
        assert elimination.run(weights).bound == pytest.approx(bound, rel=1e-9, abs=1e-12)
        assert best * (1 - 1e-3) - 1e-9 <= bound <= best * (1 + 1e-9) + 1e-9, seed
        improved += bound > float((values @ uniform(sums)).min()) * (1 + 1e-3)
        assert met and all(0 <= c < size for choices in met for c, size in zip(choices, SIZES, strict=True))
    assert improved > 5


def test_it_ends_early_when_it_is_told_that_the_bound_is_enough():
    sums = random_problem(0, SIZES, allreduces=1.2).time_sums()
    asked = []

    def enough(bound):
        asked.append(bound)
        return True

    weights = best_weights(elimination_of(sums), uniform(sums), 300, enough, lambda choices: None)
    assert len(asked) == 1 and (weights == uniform(sums)).all()
