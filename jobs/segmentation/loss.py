"""The loss of a segmentation network: cross entropy, with soft Dice or without."""

from __future__ import annotations

from dataclasses import dataclass

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
        valid = None if self.ignore is None else (labels != self.ignore).to(logits.dtype)
        if self.classes == 1:
            logits = logits.squeeze(1)
            labels = labels if valid is None else labels * valid
            entropy, probabilities, there = _binary(logits, labels, valid), torch.sigmoid(logits), labels
            dims = None
        else:
            entropy = self._entropy(logits, labels)
            if not self.dice:
                return entropy
            probabilities = torch.softmax(logits, 1)
            numbers = torch.arange(self.classes, device=logits.device).reshape(-1, *(1,) * (logits.dim() - 2))
            there = (labels.unsqueeze(1) == numbers).to(logits.dtype)
            valid = None if valid is None else valid.unsqueeze(1)
            dims = (0, *range(2, logits.dim()))
        if not self.dice:
            return entropy
        if valid is not None:
            probabilities = probabilities * valid
        dice = (2 * (probabilities * there).sum(dims) + 1) / (probabilities.sum(dims) + there.sum(dims) + 1)
        return entropy + 1 - dice.mean()

    def _entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.ignore is None:
            return F.cross_entropy(logits, labels, self.weights)
        total = F.cross_entropy(logits, labels, self.weights, ignore_index=self.ignore, reduction="sum")
        ones = -torch.ones_like(logits.detach())
        weight = F.nll_loss(ones, labels, self.weights, ignore_index=self.ignore, reduction="sum")
        return total / torch.where(weight > 0, weight, 1)


def _binary(logits: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    if valid is None:
        return F.binary_cross_entropy_with_logits(logits, labels)
    return F.binary_cross_entropy_with_logits(logits, labels, valid, reduction="sum") / valid.sum().clamp(min=1)
