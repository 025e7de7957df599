"""How predicted classes compare with labels: accuracy, Dice (F1) and intersection over union from counts.

Counts are whole numbers: summed over the ranks they are the same on any grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.distribution import Distribution


def counts_here(dist: Distribution) -> bool:
    """Return True if this rank counts its block: of the ranks that hold the same one, the first does."""
    return all(coord == 0 for axis, coord in dist.grid.coords.items() if axis not in dist.split_axes)


@dataclass(frozen=True)
class SegmentationScores:
    """How predictions compare with labels, over all samples and places that are not ignored.

    For each class (where the network has one channel, for the one class), NaN where it is neither predicted nor there.
    """

    count: int
    correct: int
    dice: tuple[float, ...]
    """For decisions it is F1."""
    iou: tuple[float, ...]
    """Intersection over union."""

    @property
    def accuracy(self) -> float:
        """Share of the places that were given the right class; NaN without any."""
        return self.correct / self.count if self.count else float("nan")

    @property
    def results(self) -> dict[str, Any]:
        """For JSON."""
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
    """Counts of places by label and predicted class; labels that are none of the classes count as wrong."""

    def __init__(self, classes: int, ignore: int | None = None) -> None:
        """One class is that of the places with 1 among those with 0."""
        self.classes, self.ignore, self._several = classes, ignore, max(2, classes)
        self.counts = np.zeros((self._several + 1, self._several), np.int64)

    def add(self, called: NDArray[Any], label: NDArray[Any]) -> None:
        """Count places: the classes that they are given, and their labels, of the same shape."""
        called, label = called.ravel(), label.ravel()
        if self.ignore is not None:
            called, label = called[label != self.ignore], label[label != self.ignore]
        is_class = (label >= 0) & (label < self._several) & (label == np.trunc(label))
        row = np.where(is_class, label, self._several).astype(np.int64)
        counted = np.bincount(row * self._several + called, minlength=self.counts.size)
        self.counts += counted.reshape(self.counts.shape)

    def sum_over(self, comm: MPI.Intracomm) -> SegmentationScores:
        """The scores of what the ranks have counted. Collective."""
        comm.Allreduce(MPI.IN_PLACE, self.counts, MPI.SUM)
        return self.scores

    @property
    def scores(self) -> SegmentationScores:
        """Of what is counted here."""
        both = self.counts.diagonal().astype(float)
        either = self.counts.sum(0) + self.counts.sum(1)[:-1]
        with np.errstate(invalid="ignore"):
            dice, iou = 2 * both / either, both / (either - both)
        of = slice(1, 2) if self.classes == 1 else slice(None)
        count, correct = int(self.counts.sum()), int(both.sum())
        return SegmentationScores(count, correct, tuple(dice[of].tolist()), tuple(iou[of].tolist()))
