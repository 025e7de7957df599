"""Thresholds, F1, precision and recall from counts.

A histogram counts how often a score falls into each bin, separately for positives, negatives and families. Counts are
integers, so their sums over the ranks are the same on any grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

BINS = 4096
CURVE_POINTS = 50


@dataclass(frozen=True)
class Threshold:
    """Rule by which cells are predicted positive: score at or above ``edge`` if ``above``, otherwise below it.

    ``edge`` is the index of a bin, and ``value`` the score at its lower end.
    """

    edge: int
    above: bool
    value: float

    def __str__(self) -> str:
        return f"{'>=' if self.above else '<'} {self.value:.3g}"


class Histogram:
    """Counts int64 (family, 2, bin) of scores; index 0 of the second dimension counts negatives, 1 positives.

    Parameters
    ----------
    low, high : float
        Range of the bins. Scores outside the range are counted in the first or last bin.
    families : sequence of str
        Names of the families.
    bins : int
        Number of bins.
    """

    def __init__(self, low: float, high: float, families: Sequence[str] = ("all",), bins: int = BINS) -> None:
        self.low, self.high, self.bins = low, max(high, low + 1e-12), bins
        self.families = tuple(families)
        self.counts = np.zeros((len(self.families), 2, bins), np.int64)

    def add(self, score: NDArray[Any], positive: NDArray[Any], family: str) -> None:
        """Count the cells of (a block of) one sample.

        Parameters
        ----------
        score : ndarray
            Scores.
        positive : ndarray
            Labels of the same shape; positive if above 0.5.
        family : str
            Family of the sample.
        """
        # In float64: in float32 a score on the border of a bin would move with its scale.
        scaled = (score.reshape(-1).astype(np.float64) - self.low) * (self.bins / (self.high - self.low))
        index = np.clip(np.floor(scaled), 0, self.bins - 1).astype(np.int64)
        # One bincount for both classes: negative cells are counted in the first half of the indices.
        index += self.bins * (positive.reshape(-1) > 0.5)
        counted = np.bincount(index, minlength=2 * self.bins).reshape(2, self.bins)
        self.counts[self.families.index(family)] += counted

    def sum_over(self, comm: MPI.Intracomm) -> Histogram:
        """Add the counts of all ranks in place and return the histogram. Collective: call it once, on every rank."""
        comm.Allreduce(MPI.IN_PLACE, self.counts, MPI.SUM)
        return self

    def best_threshold(self, *, both_directions: bool = False) -> Threshold:
        """Return the threshold with the highest F1 over all families.

        Parameters
        ----------
        both_directions : bool
            If True, thresholds below which cells are positive are tried, too.

        Returns
        -------
        Threshold
            The threshold.
        """
        choices = [self._best(above) for above in ((True, False) if both_directions else (True,))]
        _, edge, above = max(choices, key=lambda choice: choice[0])
        return Threshold(edge, above, self.low + edge * (self.high - self.low) / self.bins)

    def _best(self, above: bool) -> tuple[float, int, bool]:
        counts = self.counts.sum(0)
        # Counts below each edge, so that all thresholds are scored at once.
        below = np.concatenate([np.zeros((2, 1), np.int64), counts.cumsum(1)], axis=1)
        called = below[:, -1:] - below if above else below
        scores = 2 * called[1] / np.maximum(called.sum(0) + counts[1].sum(), 1)
        return float(scores.max()), int(scores.argmax()), above

    def f1(self, threshold: Threshold, family: str | None = None) -> float:
        """Return the F1 for a threshold, which may be fitted on another histogram with the same bins.

        Parameters
        ----------
        threshold : Threshold
            The threshold.
        family : str, optional
            The family to evaluate; by default all families.

        Returns
        -------
        float
            F1, from 0 to 1; 0 if there are neither positive nor predicted cells.
        """
        counts = self.counts.sum(0) if family is None else self.counts[self.families.index(family)]
        called = counts[:, threshold.edge :] if threshold.above else counts[:, : threshold.edge]
        # 2 TP / (2 TP + FP + FN): predicted positive plus positive.
        return 2 * int(called[1].sum()) / max(int(called.sum()) + int(counts[1].sum()), 1)

    def curve(self, above: bool) -> list[tuple[float, float]]:
        """Return recall and precision at the thresholds that reach 2 %, 4 %, ... 100 % recall over all families."""
        negative, positive = self.counts.sum(0)[:, :: -1 if above else 1].cumsum(1)
        wanted = np.ceil(positive[-1] * np.arange(1, CURVE_POINTS + 1) / CURVE_POINTS)
        reached = np.searchsorted(positive, np.maximum(wanted, 1))
        reached = np.unique(reached[reached < self.bins])
        true, false = positive[reached], negative[reached]
        return list(zip((true / positive[-1]).tolist(), (true / (true + false)).tolist(), strict=True))

    def positive_fraction(self, family: str | None = None) -> float:
        """Return the fraction of cells that are positive, over all families or in one."""
        counts = self.counts.sum(0) if family is None else self.counts[self.families.index(family)]
        return float(counts[1].sum() / max(counts.sum(), 1))


@dataclass(frozen=True)
class PredictorScore:
    """F1 of a predictor on held-out samples, with a threshold fitted on training samples."""

    name: str
    threshold: str
    training: float
    heldout: float
    families: dict[str, float]
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Recall and precision on the held-out samples by threshold; empty if the predictor has no threshold."""


def score_predictor(
    name: str, training: Histogram, heldout: Histogram, threshold: Threshold | None = None
) -> PredictorScore:
    """Return the score of a predictor.

    Parameters
    ----------
    name : str
        Name of the predictor.
    training, heldout : Histogram
        Counts of its scores.
    threshold : Threshold, optional
        By default fitted on ``training``.

    Returns
    -------
    PredictorScore
        The score.
    """
    chosen = threshold or training.best_threshold()
    families = {family: heldout.f1(chosen, family) for family in heldout.families}
    curve = heldout.curve(chosen.above) if heldout.bins > 2 else []
    return PredictorScore(name, str(chosen), training.f1(chosen), heldout.f1(chosen), families, curve)


def gains(verdicts: Sequence[PredictorScore]) -> dict[str, float]:
    """Return, by name of each score but the last, how much higher the held-out F1 of the last score is."""
    *others, network = verdicts
    return {other.name: network.heldout - other.heldout for other in others}


def headline(verdicts: Sequence[PredictorScore]) -> str:
    """Return a line with the last score's held-out F1 and its gains over other scores with a curve, smallest first."""
    network, over = verdicts[-1], gains([verdict for verdict in verdicts if verdict.curve])
    ranked = sorted(over.items(), key=lambda item: item[1])
    text = ", ".join(f"{gain:+.3f} against {name}" for name, gain in ranked)
    return f"held-out F1 of {network.name}: {network.heldout:.3f}" + (f" ({text})" if text else "")


def format_table(verdicts: Sequence[PredictorScore]) -> str:
    """Return the scores as an aligned table: F1 on training and held-out samples, then by family."""
    families = list(verdicts[0].families)
    head = ["F1", "threshold", "training", "held-out", *families]
    rows = [
        [v.name, v.threshold, f"{v.training:.3f}", f"{v.heldout:.3f}", *(f"{v.families[f]:.3f}" for f in families)]
        for v in verdicts
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        lines.append(
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        )
    return "\n".join(lines)
