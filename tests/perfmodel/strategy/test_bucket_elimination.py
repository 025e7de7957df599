"""The additive minimum against all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distconv.perfmodel.strategy.bucket_elimination import Elimination, decision_order
from distconv.perfmodel.strategy.solver import solve
from tests.perfmodel.strategy.problems import brute_force, is_close, random_problem

NONE = 0
"""As many combinations as are enumerated where the search itself is tested."""


@pytest.mark.parametrize("entries", [None, 30, 4], ids=["whole", "split", "in pieces"])
def test_elimination_is_the_weighted_minimum_and_split_a_bound(entries):
    exact = 0
    for seed in range(40):
        problem = random_problem(seed, (3, 2, 4, 1, 3, 2), density=0.6)
        sums = problem.time_sums()
        weights = np.random.default_rng(seed).random(len(sums.rows))
        choices = np.array(list(itertools.product(*map(range, problem.sizes))))
        weighted = sums.values(choices) @ weights
        relaxation = Elimination(sums, decision_order(sums), entries).run(weights)
        assert relaxation.bound <= weighted.min() + 1e-9, seed
        exact += is_close(relaxation.bound, weighted.min())
        for variable, marginals in enumerate(relaxation.marginals()):
            least = [weighted[choices[:, variable] == value].min() for value in range(problem.sizes[variable])]
            assert (marginals <= np.array(least) + 1e-9).all(), seed
            assert entries or marginals == pytest.approx(least, abs=1e-9), seed
        if entries is None:
            assert is_close(float(sums.values(relaxation.choices()) @ weights), weighted.min()), seed
    assert exact == 40 if entries is None else exact < 40


@pytest.mark.long
def test_the_search_is_exact_where_buckets_are_split(monkeypatch):
    monkeypatch.setattr("distconv.perfmodel.strategy.bucket_elimination.BUCKET_ENTRIES", 12)
    for seed in range(15, 19):
        problem = random_problem(seed, (3, 2, 4, 3, 3), density=0.8)
        best, smallest = brute_force(problem)
        assert is_close(solve(problem, few=NONE).time, best), seed
        best, _ = brute_force(problem, smallest + 0.5)
        assert is_close(solve(problem, smallest + 0.5, few=NONE).time, best), seed
