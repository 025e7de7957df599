"""AlexNet for CIFAR: the five convolutions of the single-column network, and one linear layer.

Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997, 2014; with the
strides, pools and classifier that the benchmark pytorch-classification (W. Yang) gave it for 32x32 images, 2.47 M
parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .initialisation import initialise_for_relu


class AlexNet(nn.Module):
    """AlexNet for CIFAR: x (N, in_channels, H, W) to logits (N, classes).

    H and W are at least 29; beyond 60 the last features are averaged.

    Parameters
    ----------
    width : int
        Channels of the first convolution.
    in_channels, classes : int
    """

    def __init__(self, width: int = 64, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, width, 11, stride=4, padding=5),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 3 * width, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(3 * width, 6 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6 * width, 4 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(4 * width, classes)
        initialise_for_relu(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits


def alexnet(width: int = 64, in_channels: int = 3, classes: int = 10) -> AlexNet:
    """Return AlexNet for CIFAR.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`AlexNet`.

    Returns
    -------
    AlexNet
    """
    return AlexNet(width, in_channels, classes)
