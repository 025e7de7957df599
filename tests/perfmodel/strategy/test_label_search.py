"""Labels: which of them are dropped, and what a few of them prove."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from distconv.perfmodel.strategy import label_search
from distconv.perfmodel.strategy.solver import solve
from tests.perfmodel.strategy.problems import brute_force, is_close, random_problem, reference_time

NONE = 0
"""As many combinations as are enumerated where the search itself is tested."""


@pytest.mark.long
def test_bounds_hold_and_starts_are_kept_when_few_labels_are(monkeypatch):
    monkeypatch.setattr("distconv.perfmodel.strategy.solver.WIDTHS", (1, 2))
    proven = 0
    for seed in range(8):
        problem = random_problem(seed, (4, 3, 4, 2, 4), 1.2)
        best, smallest = brute_force(problem)
        start = [0] * 5
        found = solve(problem, None, [start], 20.0, NONE)
        assert found.bound <= best * (1 + 1e-9) and best <= found.time * (1 + 1e-12), seed
        assert found.time <= reference_time(problem, start), seed
        if found.optimal:
            proven += 1
            assert is_close(found.time, best), seed
        best, _ = brute_force(problem, smallest + 0.3)
        found = solve(problem, smallest + 0.3, [start], 20.0, NONE)
        assert found.bound <= best * (1 + 1e-9) and best <= found.time * (1 + 1e-12), seed
    assert 0 < proven < 8


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_no_label_is_dropped_but_for_one_of_its_group_that_is_nowhere_worse(columns):
    random = np.random.default_rng(columns)
    for _ in range(50):
        keys = random.integers(0, 3, 40)
        values = np.round(random.random((40, columns)), 1)
        kept = set(label_search.undominated(keys, values).tolist())
        for label in set(range(40)) - kept:
            assert any(keys[k] == keys[label] and (values[k] <= values[label]).all() for k in kept)
        for label in kept if columns < 3 else ():
            others = [k for k in kept - {label} if keys[k] == keys[label]]
            assert not any((values[k] <= values[label]).all() for k in others)


@pytest.mark.parametrize("limit", [1 << 62, 200, 12])
def test_labels_have_one_key_only_if_they_agree_in_the_open_variables(monkeypatch, limit):
    """With any limit of the keys, also where they are numbered again before they overflow."""
    monkeypatch.setattr(label_search, "KEY_LIMIT", limit)
    sizes = (3, 4, 5, 2, 7)
    choices = np.random.default_rng(0).integers(0, sizes, (300, 5)).astype(np.int16)
    for variables in ((), (1,), (0, 2, 4), (0, 1, 2, 3, 4)):
        keys = label_search.group_keys(choices, sizes, SimpleNamespace(open_variables=variables))
        same = (choices[:, None, variables] == choices[None, :, variables]).all(-1)
        assert ((keys[:, None] == keys[None, :]) == same).all()


def test_keys_of_many_variables_do_not_overflow():
    sizes = (30,) * 40
    choices = np.zeros((3, 40), np.int16)
    choices[1, 0], choices[2, 39] = 1, 1
    keys = label_search.group_keys(choices, sizes, SimpleNamespace(open_variables=range(40)))
    assert len(set(keys.tolist())) == 3
