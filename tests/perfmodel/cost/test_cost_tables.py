"""Sums of terms against the recurrences that they are unrolled from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distconv.perfmodel.cost.cost_tables import CostKind, as_choice_array, makespan, peak
from tests.perfmodel.strategy.problems import is_close, random_problem, reference_memory, reference_time


def test_unrolled_sums_are_the_recurrences():
    for seed in range(60):
        problem = random_problem(seed)
        choices = np.array(list(itertools.product(*map(range, problem.sizes))))
        times, memories = problem.time_sums().values(choices), problem.memory_sums().values(choices)
        for choice, time_s, memory in zip(choices, times.max(axis=1), memories.max(axis=1), strict=True):
            assert is_close(time_s, reference_time(problem, choice)) and is_close(
                memory, reference_memory(problem, choice)
            ), seed


def test_changes_are_differences_of_values():
    problem = random_problem(3, (4, 3, 4, 2))
    sums, choices = problem.time_sums(), as_choice_array([3, 1, 2, 0])
    for variable, size in enumerate(problem.sizes):
        for value in range(size):
            other = choices.copy()
            other[variable] = value
            change = sums.values(other) - sums.values(choices)
            assert sums.sum_changes(choices, variable)[value] == pytest.approx(change, abs=1e-12)


def test_allreduces_run_one_after_the_other_behind_what_is_computed():
    # Computing ends at 1 and 3; the first allreduce lasts from 1 to 6, so that the second begins at 6.
    steps = [(CostKind.COMPUTE, 1.0), (CostKind.ALLREDUCE, 5.0), (CostKind.COMPUTE, 2.0), (CostKind.ALLREDUCE, 1.0)]
    assert makespan(steps, max) == 7
    assert makespan([*steps, (CostKind.COMPUTE, 9.0)], max) == 12


def test_what_is_released_makes_room():
    steps = [
        (CostKind.RESIDENT, 10.0),
        (CostKind.KEEP, 4.0),
        (CostKind.TRANSIENT, 3.0),
        (CostKind.RELEASE, 4.0),
        (CostKind.KEEP, 1.0),
    ]
    assert peak([*steps, (CostKind.TRANSIENT, 5.0)], max) == 10 + 4 + 3
    assert peak([*steps, (CostKind.TRANSIENT, 7.0)], max) == 10 + 1 + 7
    assert peak([(CostKind.KEEP, 2.0), (CostKind.TRANSIENT, 1.0), (CostKind.KEEP, 3.0)], max) == 5
