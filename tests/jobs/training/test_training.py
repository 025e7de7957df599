"""What all training jobs share: the learning rate."""

from __future__ import annotations

import itertools

import pytest

from distconv.jobs.training.training import learning_rate


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == max(rates) == 2.0
    assert rates[100] == pytest.approx(0.0)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
