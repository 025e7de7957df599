"""Segmentation scores from counts: accuracy, Dice (F1) and intersection over union.

Counts are integers, so their sums over the ranks are the same on any grid. The trainers use the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.distribution import Distribution


def is_counting_rank(dist: Distribution) -> bool:
    """Return True if this rank counts its block: of the ranks that hold the same block, only the first does."""
    return all(coord == 0 for axis, coord in dist.grid.coords.items() if axis not in dist.split_axes)


@dataclass(frozen=True)
class SegmentationScores:
    """Scores of predictions over all samples and all pixels that are not ignored.

    Scores are given for each class, or only for class 1 if the network has one channel. They are NaN for a class that
    is neither predicted nor present.
    """

    count: int
    correct: int
    dice: tuple[float, ...]
    """Dice coefficient of each class, which equals F1."""
    iou: tuple[float, ...]
    """Intersection over union."""

    @property
    def accuracy(self) -> float:
        """Fraction of pixels with the right class; NaN if there are no pixels."""
        return self.correct / self.count if self.count else float("nan")

    @property
    def results(self) -> dict[str, Any]:
        """Scores as JSON values, with None in place of NaN."""
        return {
            "accuracy": self.accuracy if self.count else None,
            **{f"mean_{name}": _mean(values) for name, values in (("dice", self.dice), ("iou", self.iou))},
            "dice": _plain(self.dice),
            "iou": _plain(self.iou),
        }

    def __str__(self) -> str:
        def text(values: tuple[float, ...]) -> str:
            return ", ".join("-" if np.isnan(value) else f"{value:.4f}" for value in values)

        right = f"accuracy {100 * self.accuracy:.2f} % ({self.correct} of {self.count})"
        return f"{right}, Dice (F1): {text(self.dice)}; IoU: {text(self.iou)}"


def _plain(values: tuple[float, ...]) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values]


def _mean(values: tuple[float, ...]) -> float | None:
    there = [value for value in values if not np.isnan(value)]
    return sum(there) / len(there) if there else None


class Confusion:
    """Confusion matrix: counts of pixels by label and predicted class. A label outside the classes counts as wrong."""

    def __init__(self, classes: int, ignore: int | None = None) -> None:
        """Start at zero. With one class, labels and predictions are 0 or 1."""
        self.classes, self.ignore, self._several = classes, ignore, max(2, classes)
        # The last row counts labels that are not a class, which every prediction misses.
        self.counts = np.zeros((self._several + 1, self._several), np.int64)

    def add(self, predicted: NDArray[Any], label: NDArray[Any]) -> None:
        """Count pixels of one block.

        Parameters
        ----------
        predicted : ndarray of int
            Predicted classes.
        label : ndarray
            Labels, of the same shape.
        """
        predicted, label = predicted.ravel(), label.ravel()
        if self.ignore is not None:
            predicted, label = predicted[label != self.ignore], label[label != self.ignore]
        is_class = (label >= 0) & (label < self._several) & (label == np.trunc(label))
        row = np.where(is_class, label, self._several).astype(np.int64)
        counted = np.bincount(row * self._several + predicted, minlength=self.counts.size)
        self.counts += counted.reshape(self.counts.shape)

    def sum_over(self, comm: MPI.Intracomm) -> SegmentationScores:
        """Add the counts of all ranks in place and return the scores. Collective: call it once, on every rank."""
        comm.Allreduce(MPI.IN_PLACE, self.counts, MPI.SUM)
        return self.scores

    @property
    def scores(self) -> SegmentationScores:
        """Scores of the pixels counted so far."""
        both = self.counts.diagonal().astype(float)
        either = self.counts.sum(0) + self.counts.sum(1)[:-1]
        with np.errstate(invalid="ignore"):
            dice, iou = 2 * both / either, both / (either - both)
        classes = slice(1, 2) if self.classes == 1 else slice(None)
        count, correct = int(self.counts.sum()), int(both.sum())
        return SegmentationScores(count, correct, tuple(dice[classes].tolist()), tuple(iou[classes].tolist()))
