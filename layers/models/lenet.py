"""LeNet-5 for MNIST.

Source: LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", Proc. IEEE 86, 1998,
II-B. This model has 61,706 parameters instead of 60,000. It lacks the 44 parameters of trainable subsampling. It has
900 more in C3, where each map is connected to all maps of S2, and 850 more in the output layer, which is trained.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LeNet5(nn.Module):
    """LeNet-5: x (N, in_channels, H, W) to logits (N, classes).

    H and W are at least 28; beyond that the outputs of C5 are averaged.

    Parameters
    ----------
    width : int
        Maps of C1. C3 and C5 have 8/3 and 20 times as many maps, and F6 has 14 times as many units.
    in_channels, classes : int
    """

    def __init__(self, width: int = 6, in_channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(in_channels, width, 5, padding=2)  # the paper's images come with this border: 32x32
        self.c3 = nn.Conv2d(width, 8 * width // 3, 5)
        self.c5 = nn.Conv2d(8 * width // 3, 20 * width, 5)
        self.f6 = nn.Linear(20 * width, 14 * width)
        self.output = nn.Linear(14 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(torch.tanh(self.c1(x)), 2)
        x = F.avg_pool2d(torch.tanh(self.c3(x)), 2)
        x = torch.flatten(F.adaptive_avg_pool2d(torch.tanh(self.c5(x)), 1), 1)
        logits: torch.Tensor = self.output(torch.tanh(self.f6(x)))
        return logits


def lenet5(width: int = 6, in_channels: int = 1, classes: int = 10) -> LeNet5:
    """Return LeNet-5.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`LeNet5`.

    Returns
    -------
    LeNet5
    """
    return LeNet5(width, in_channels, classes)
