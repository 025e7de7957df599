"""Loss of a segmentation network: cross entropy, optionally with soft Dice.

Written with torch operators alone: it works on tensors and on distributed tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True, eq=False)
class SegmentationLoss:
    """Mean cross entropy of logits (N, C, ...) and labels (N, ...) over a mini-batch, binary for one class.

    The loss of a mini-batch in which all pixels are ignored is 0. ``F.cross_entropy`` returns NaN.

    Source: Milletari et al., "V-Net", 3DV 2016, section 3 (soft Dice).

    Parameters
    ----------
    classes : int
        Number of classes, C.
    ignore : int, optional
        Label value excluded from the loss.
    weights : Tensor, shape (C,), optional
        Class weights, as in ``F.cross_entropy``. They weight neither the soft Dice nor the binary cross entropy.
    dice : bool
        If True, add one minus the soft Dice coefficient, averaged over classes. It is F1 with probabilities in place of
        decisions. With cross entropy alone, a network predicts rare classes only after many steps.
    """

    classes: int
    ignore: int | None = None
    weights: torch.Tensor | None = None
    dice: bool = False

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        return self.from_sums(*self.sums(logits, labels))

    def sums(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the sums from which :meth:`from_sums` computes the loss; those of several batches may be added.

        Parameters
        ----------
        logits : Tensor
            Logits (N, C, ...).
        labels : Tensor
            Labels (N, ...).

        Returns
        -------
        tuple of Tensor
            Summed cross entropy and summed weight, both scalars. With ``dice`` also, for each class (C), the summed
            probabilities at its pixels, and its summed probabilities plus its number of pixels.
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

    def from_sums(self, entropy: torch.Tensor, weight: torch.Tensor, *dice: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar, for the sums that :meth:`sums` returns.

        Parameters
        ----------
        entropy, weight, dice
            As :meth:`sums` returns them.

        Returns
        -------
        torch.Tensor
        """
        mean = entropy / torch.where(weight > 0, weight, 1)
        if not dice:
            return mean
        overlap, sizes = dice
        # With the ones, the coefficient of a class without pixels and predictions is 1 instead of 0 / 0.
        return mean + 1 - ((2 * overlap + 1) / (sizes + 1)).mean()

    def _entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index: Any = {} if self.ignore is None else {"ignore_index": self.ignore}
        total = F.cross_entropy(logits, labels, self.weights, **index, reduction="sum")
        if self.weights is None and self.ignore is None:
            return total, logits.new_full((), labels.numel())
        # The negative log-likelihood of -1 everywhere is the sum of the weights of all pixels that are not ignored.
        ones = -torch.ones_like(logits.detach())
        return total, F.nll_loss(ones, labels, self.weights, **index, reduction="sum")
