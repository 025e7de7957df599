"""F1 and thresholds against brute force, and their table."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.scores import Histogram, Threshold, Verdict, table


def test_f1_and_the_best_threshold_are_those_of_brute_force() -> None:
    random = np.random.default_rng(1)
    label = random.random(5000) < 0.1
    for sign in (1, -1):
        score = np.clip(0.5 + sign * 0.15 * label + 0.1 * random.standard_normal(5000), 0, 1)
        histogram = Histogram(0.0, 1.0, ["one"])
        histogram.add(score, label, "one")
        found = histogram.best_threshold(both_directions=True)
        assert found.above == (sign > 0)
        called = score >= found.value if found.above else score < found.value
        f1 = 2 * (called & label).sum() / (called.sum() + label.sum())
        assert histogram.f1(found) == pytest.approx(f1)
        assert all(histogram.f1(Threshold(edge, found.above, 0.0)) <= histogram.f1(found) for edge in range(4097))
        assert histogram.positive_fraction() == pytest.approx(label.mean())


def test_the_table_is_aligned() -> None:
    verdicts = [
        Verdict("a", ">= 0.5", 0.5, 0.25, {"shear": 1.0}),
        Verdict("longer", "< 10", 0.125, 0.5, {"shear": 0.0}),
    ]
    lines = table(verdicts).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["F1", "threshold", "training", "held-out", "shear"]
    assert lines[2].split() == ["longer", "<", "10", "0.125", "0.500", "0.000"]
