"""Sums of terms against the recurrences that they are unrolled from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distconv.perfmodel.strategy.cost_tables import one
from tests.perfmodel.strategy.problems import close, plain_memory, plain_time, random_problem


def test_unrolled_sums_are_the_recurrences():
    for seed in range(60):
        problem = random_problem(seed)
        choices = np.array(list(itertools.product(*map(range, problem.sizes))))
        times, memories = problem.time_sums().values(choices), problem.memory_sums().values(choices)
        for choice, time_s, memory in zip(choices, times.max(axis=1), memories.max(axis=1), strict=True):
            assert close(time_s, plain_time(problem, choice)) and close(memory, plain_memory(problem, choice)), seed


def test_changes_are_differences_of_values():
    problem = random_problem(3, (4, 3, 4, 2))
    sums, choices = problem.time_sums(), one([3, 1, 2, 0])
    for variable, size in enumerate(problem.sizes):
        for value in range(size):
            other = choices.copy()
            other[variable] = value
            change = sums.values(other) - sums.values(choices)
            assert sums.changes(choices, variable)[value] == pytest.approx(change, abs=1e-12)
