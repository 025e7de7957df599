"""Accuracy of predicted step times: a row for each measurement, and statistics of the errors.

A prediction describes a machine that runs nothing else, so it is compared with the fastest of the measured steps: other
work on the machine only makes steps slower. The median of the steps is printed, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import scipy.stats


@dataclass(frozen=True)
class AccuracyRow:
    """Predicted and measured seconds per step of one variant of a model."""

    model: str
    name: str
    """Name of the variant in the table."""
    what: str
    """Description of the variant, such as its schedule or its number of ranks."""
    predicted: float
    """Predicted seconds per step."""
    times: Sequence[float]
    """Measured seconds of each step."""

    @property
    def measured(self) -> float:
        """Return the seconds of the fastest step."""
        return min(self.times)

    @property
    def error(self) -> float:
        """Return the error of the prediction, relative to the fastest step."""
        return self.predicted / self.measured - 1


def print_rows(rows: Sequence[AccuracyRow]) -> None:
    """Print a line for each row."""
    names, whats = (max((len(getattr(row, each)) for row in rows), default=0) for each in ("name", "what"))
    for row in rows:
        print(
            f"{row.model:<10} {row.name:<{names}} {row.what:<{whats}} measured {row.measured * 1e3:9.2f} ms (median "
            f"{statistics.median(row.times) * 1e3:9.2f}), predicted {row.predicted * 1e3:9.2f} ms, {row.error:+.1%}",
            flush=True,
        )


def print_accuracy(rows: Sequence[AccuracyRow]) -> None:
    """Print the errors relative to the median steps, then those to the fastest steps with the rank correlation."""
    errors = [abs(row.error) for row in rows]
    to_medians = [abs(row.predicted / statistics.median(row.times) - 1) for row in rows]
    order = scipy.stats.spearmanr([row.predicted for row in rows], [row.measured for row in rows]).statistic
    print(
        f"relative to the medians of the steps, which other load on the machine lengthens: median error "
        f"{statistics.median(to_medians):.1%}, largest {max(to_medians):.1%}"
    )
    print(
        f"{len(rows)} configurations: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, "
        f"Spearman {order:.3f}"
    )
