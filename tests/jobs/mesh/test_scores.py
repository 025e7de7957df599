"""F1 and thresholds against brute force, and their table."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.scores import Histogram, PredictorScore, Threshold, format_table, gains, headline


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


def test_scores_from_minus_one_to_one_fall_into_equal_bins_and_what_lies_beyond_into_the_last() -> None:
    histogram = Histogram(-1.0, 1.0, ["one", "two"], bins=4)
    scores = np.array([-1.0, -0.51, -0.5, -0.01, 0.0, 0.49, 0.5, 0.99, 1.0, -7.0, 7.0])
    histogram.add(scores, np.zeros(11), "two")
    histogram.add(scores[:3], np.ones(3), "one")
    np.testing.assert_array_equal(histogram.counts, [[[0, 0, 0, 0], [2, 1, 0, 0]], [[3, 2, 2, 4], [0, 0, 0, 0]]])
    # Positives below -0.25, negatives above: the edge that parts them is one of -0.5 and 0.
    parted = Histogram(-1.0, 1.0, bins=4)
    parted.add(np.array([-0.9, -0.3, 0.3, 0.9]), np.array([1.0, 1.0, 0.0, 0.0]), "all")
    assert (parted.best_threshold(both_directions=True).value, str(parted.best_threshold(both_directions=True))) == (
        0.0,
        "< 0",
    )


@pytest.mark.parametrize("above", [True, False])
def test_recall_and_precision_are_those_of_brute_force(above: bool) -> None:
    random = np.random.default_rng(2)
    label = random.random(3000) < 0.2
    score = np.clip(0.5 + (0.1 if above else -0.1) * label + 0.1 * random.standard_normal(3000), 0, 1)
    histogram = Histogram(0.0, 1.0, ["one", "two"], bins=64)
    histogram.add(score[:1000], label[:1000], "one")
    histogram.add(score[1000:], label[1000:], "two")
    every = []
    for edge in np.arange(65) / 64:
        called = score >= edge if above else score < edge
        if called.any():
            every.append(((called & label).sum() / label.sum(), (called & label).sum() / called.sum()))
    curve = histogram.curve(above)
    assert all(min(abs(recall - r) + abs(precision - p) for r, p in every) < 1e-12 for recall, precision in curve)
    # Each fiftieth of the positives is reached by the strictest threshold that does.
    for level in np.arange(1, 51) / 50:
        assert min(r for r, _ in every if r >= level - 1e-12) == pytest.approx(
            min(r for r, _ in curve if r >= level - 1e-12)
        )
    assert [recall for recall, _ in curve] == sorted({recall for recall, _ in curve})
    assert Histogram(0.0, 1.0).curve(above) == []


def test_the_headline_names_gains_over_what_has_a_threshold_to_choose() -> None:
    curve = [(0.5, 0.5)]
    verdicts = [
        PredictorScore("always", ">= 0", 0.2, 0.2, {}),
        PredictorScore("one channel", ">= 1", 0.5, 0.5, {}, curve),
        PredictorScore("one cell", ">= 0.5", 0.7, 0.65, {}, curve),
        PredictorScore("net", ">= 0.5", 0.8, 0.75, {}, curve),
    ]
    assert headline(verdicts) == "held-out F1 of net: 0.750 (+0.100 against one cell, +0.250 against one channel)"
    assert headline(verdicts[-1:]) == "held-out F1 of net: 0.750"
    assert gains(verdicts) == pytest.approx({"always": 0.55, "one channel": 0.25, "one cell": 0.1})


def test_the_table_is_aligned() -> None:
    verdicts = [
        PredictorScore("a", ">= 0.5", 0.5, 0.25, {"shear": 1.0}),
        PredictorScore("longer", "< 10", 0.125, 0.5, {"shear": 0.0}),
    ]
    lines = format_table(verdicts).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["F1", "threshold", "training", "held-out", "shear"]
    assert lines[2].split() == ["longer", "<", "10", "0.125", "0.500", "0.000"]
