"""Predicted times against sums by hand, and what they say about who wins."""

from __future__ import annotations

import pytest

from distconv.kernels.scan import Problem, Size, Speed, predict

CALLS = Speed(1.0, 3.0, 1e30, 1e30, 1e30, 0.0, 1e30)
"""Every product takes a second, those of a stacked level three together, whatever they compute."""

ARITHMETIC = Speed(0.0, 0.0, 1.0, 1.0, 1e30, 0.0, 1e30)
"""Every FLOP takes a second."""

MESSAGES = Speed(0.0, 0.0, 1e30, 1e30, 1e30, 1.0, 1e30)


def stacked(counts, width=4, samples=2):
    return Problem((samples, width), "", tuple((Size(width, width, 1.0, samples, n),) for n in counts), True)


def listed(sizes, samples=2):
    return Problem((samples, sizes[0].cols), "", (tuple(sizes),), False)


def test_calls_of_a_stack_are_one_for_each_product_or_for_each_level():
    times = predict(stacked([7]), CALLS).times_s
    assert times["linear"] == pytest.approx(7)
    # Up: a vector and pairs, a vector (level 1 has no pair left); down: two levels, one of them empty; the last.
    assert times["blelloch"] == pytest.approx((1 + 3) + 1 + (3 + 3) + 1)


def test_arithmetic_is_that_of_matrices_by_vectors_and_by_matrices():
    times = predict(stacked([7]), ARITHMETIC).times_s
    mv, mm = 2 * 2 * 4**2, 2 * 2 * 4**3
    assert times["linear"] == pytest.approx(7 * mv)
    assert times["blelloch"] == pytest.approx(2 * mm + 7 * mv)


def test_zeros_save_arithmetic_and_identities_take_nothing():
    sizes = [Size(4, 4, 0.5, 2), None, Size(4, 4, 0.25, 2)]
    assert predict(listed(sizes), ARITHMETIC).times_s["linear"] == pytest.approx(2 * 2 * 16 * 0.75)


def test_products_of_full_matrices_run_at_the_rate_of_full_ones_and_others_at_that_of_sparse_ones():
    speed = Speed(0.0, 0.0, 1e3, 1.0, 1e30, 0.0, 1e30)
    whole = predict(stacked([7], width=4), speed).times_s
    assert whole["blelloch"] == pytest.approx((2 * 2 * 2 * 4**3 + 7 * 2 * 2 * 4**2) / 1e3)
    sparse = predict(listed([Size(4, 4, 0.5, 2)] * 7), speed).times_s
    assert sparse["linear"] == pytest.approx(7 * 2 * 2 * 4**2 / 2)


def test_messages_are_one_after_another_or_as_many_as_levels():
    times = predict(stacked([1] * 8), MESSAGES).times_s
    assert times["linear"] == pytest.approx(7)
    assert times["blelloch"] == pytest.approx(2 * 3)


def test_ranks_share_the_arithmetic_of_a_scan_but_not_of_one_after_another():
    alone, shared = (predict(stacked(counts), ARITHMETIC).times_s for counts in ([64], [8] * 8))
    assert shared["linear"] == pytest.approx(alone["linear"])
    assert shared["blelloch"] < alone["blelloch"] / 2


def test_the_truncated_scan_is_the_best_of_its_depths():
    prediction = predict(stacked([100]), Speed(5.0, 5.0, 1.0, 1.0, 1e30, 0.0, 1e30))
    assert 1 <= prediction.depth <= 7
    assert prediction.times_s[prediction.method] == min(prediction.times_s.values())
