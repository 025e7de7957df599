"""How a classifier does on labelled samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from distconv.errors import DataError


@dataclass(frozen=True)
class Score:
    """How a classifier did on a group of samples, each of which counts once."""

    samples: int
    correct: int
    loss: float
    """Mean cross entropy."""

    @property
    def accuracy(self) -> float:
        """Share of the samples that were classified correctly."""
        return self.correct / self.samples

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.2f} % ({self.correct} of {self.samples}), loss {self.loss:.4f}"


def score(path: object, group: str, batches: Iterable[tuple[Sequence[int], torch.Tensor, torch.Tensor]]) -> Score:
    """The score of all batches of a group: indices of the samples, labels (N), logits (N, classes) of each.

    Raises
    ------
    DataError
        If the loss on a batch is not finite.
    """
    count, correct, total = 0, 0, 0.0
    for samples, labels, logits in batches:
        loss = float(F.cross_entropy(logits.double(), labels, reduction="sum"))
        if not math.isfinite(loss):
            raise DataError(
                f"{path}: the loss on samples {samples[0]} to {samples[-1]} of {group!r} is {loss}; look for NaN in "
                "them"
            )
        count += len(labels)
        total += loss
        correct += int((logits.argmax(1) == labels).sum())
    return Score(count, correct, total / count)
