"""The loss of a segmentation network: cross entropy, with soft Dice or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True, eq=False)
class SegmentationLoss:
    """Mean cross entropy of logits (N, C, ...) and labels (N, ...) over the mini-batch; of one channel the binary one.

    ``weights`` (C) of the classes, and labels ``ignore`` that are none, are those of ``F.cross_entropy``; but a batch
    where all is ignored has the loss 0.

    ``dice`` adds one minus the soft Dice coefficient of the mini-batch, the mean over the classes. The coefficient is
    F1 with probabilities in place of decisions: cross entropy alone leaves the rare classes out for long (Milletari et
    al., "V-Net", 3DV 2016, section 3).
    """

    classes: int
    ignore: int | None = None
    weights: torch.Tensor | None = None
    dice: bool = False

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, a scalar."""
        return self.of(*self.sums(logits, labels))

    def sums(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the loss is made of; of several batches these add up to what they are of all samples at once.

        They are the entropy and its weight, scalars, and with ``dice`` for each class (C) the probabilities where it
        is, and those everywhere plus its places.
        """
        valid = None if self.ignore is None else (labels != self.ignore).to(logits.dtype).unsqueeze(1)
        if self.classes == 1:
            there = labels.unsqueeze(1) if valid is None else labels.unsqueeze(1) * valid
            entropy = F.binary_cross_entropy_with_logits(logits, there, valid, reduction="sum")
            weight = logits.new_full((), labels.numel()) if valid is None else valid.sum()
        else:
            entropy, weight = self._entropy(logits, labels)
        if not self.dice:
            return entropy, weight
        if self.classes == 1:
            probabilities = torch.sigmoid(logits)
        else:
            probabilities = torch.softmax(logits, 1)
            numbers = torch.arange(self.classes, device=logits.device).reshape(-1, *(1,) * (logits.dim() - 2))
            there = (labels.unsqueeze(1) == numbers).to(logits.dtype)
        if valid is not None:
            probabilities = probabilities * valid
        dims = (0, *range(2, logits.dim()))
        return entropy, weight, (probabilities * there).sum(dims), probabilities.sum(dims) + there.sum(dims)

    def of(self, entropy: torch.Tensor, weight: torch.Tensor, *dice: torch.Tensor) -> torch.Tensor:
        """The loss of the samples with these :meth:`sums`."""
        mean = entropy / torch.where(weight > 0, weight, 1)
        if not dice:
            return mean
        overlap, sizes = dice
        return mean + 1 - ((2 * overlap + 1) / (sizes + 1)).mean()

    def _entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index: Any = {} if self.ignore is None else {"ignore_index": self.ignore}
        total = F.cross_entropy(logits, labels, self.weights, **index, reduction="sum")
        if self.weights is None and self.ignore is None:
            return total, logits.new_full((), labels.numel())
        ones = -torch.ones_like(logits.detach())
        return total, F.nll_loss(ones, labels, self.weights, **index, reduction="sum")
