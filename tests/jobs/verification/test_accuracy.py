"""Errors beside the fastest step, and beside the median."""

from __future__ import annotations

from distconv.jobs.verification.accuracy import AccuracyRow, print_accuracy, print_rows

ROWS = [
    AccuracyRow("net", "n=2", "2 rank(s)", 0.011, [0.02, 0.01, 0.05]),
    AccuracyRow("net", "h=2, planned", "2 rank(s)", 0.015, [0.02, 0.02, 0.02]),
    AccuracyRow("net", "c=2", "2 rank(s)", 0.030, [0.03, 0.04, 0.05]),
]


def test_a_row_has_the_fastest_step_the_median_and_the_error_beside_the_fastest(capsys):
    assert [row.measured for row in ROWS] == [0.01, 0.02, 0.03]
    print_rows(ROWS)
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.split() == [*"net n=2 2 rank(s) measured 10.00 ms (median 20.00), predicted 11.00 ms, +10.0%".split()]
    assert second.startswith("net        h=2, planned 2 rank(s) measured     20.00 ms") and second.endswith("-25.0%")


def test_the_last_line_is_of_the_fastest_steps_and_the_one_before_of_medians(capsys):
    print_accuracy(ROWS)
    medians, fastest = capsys.readouterr().out.splitlines()
    assert fastest == "3 configurations: median error 10.0%, largest 25.0%, Spearman 1.000"
    assert medians.endswith("median error 25.0%, largest 45.0%")
