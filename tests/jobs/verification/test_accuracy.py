"""Errors beside the fastest step, and beside the median."""

from __future__ import annotations

from distconv.jobs.verification.accuracy import AccuracyRow, print_accuracy, print_rows

ROWS = [
    AccuracyRow("net", "n=2", "2 rank(s)", 0.011, [0.02, 0.01, 0.05]),
    AccuracyRow("net", "h=2, planned", "2 rank(s)", 0.015, [0.02, 0.02, 0.02]),
    AccuracyRow("network", "c=2", "3 rank(s)", 0.010, [0.03, 0.04, 0.05]),
]


def test_rows_and_statistics_are_printed_in_full(capsys):
    print_rows(ROWS)
    print_accuracy(ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "net        n=2          2 rank(s) measured     10.00 ms (median     20.00), predicted     11.00 ms, +10.0%",
        "net        h=2, planned 2 rank(s) measured     20.00 ms (median     20.00), predicted     15.00 ms, -25.0%",
        "network    c=2          3 rank(s) measured     30.00 ms (median     40.00), predicted     10.00 ms, -66.7%",
        "relative to the medians of the steps, which other load on the machine lengthens: median error 45.0%, "
        "largest 75.0%",
        "3 configurations: median error 25.0%, largest 66.7%, Spearman -0.500",
    ]
