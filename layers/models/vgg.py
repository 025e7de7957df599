"""VGG-11 and VGG-16 for CIFAR, with and without batch norm.

Source: Simonyan, Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015, table 1,
A and D. On 32x32 images the features end at 1x1, and the two hidden linear layers are as wide as the features (512)
instead of 4096, as in the collection pytorch-cifar-models (Y. Chen): 9.76 M and 15.25 M parameters with batch norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .initialisation import initialise_for_relu

VGG_11 = ((1,), (2,), (4, 4), (8, 8), (8, 8))
"""As :data:`VGG_16`, for configuration A."""
VGG_16 = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Filters of each convolution as multiples of ``width``; a max pool of 2 ends each group."""


class VGG(nn.Module):
    """VGG: x (N, in_channels, H, W) to logits (N, classes).

    H and W are at least 32; beyond 63 the last features are averaged.

    Parameters
    ----------
    groups : sequence of sequence of int
        Filters of each convolution as multiples of ``width``; a max pool of 2 ends each group.
    width, in_channels, classes : int
    batch_norm : bool
        True for a batch norm after each convolution. Otherwise none.
    dropout : float
        Probability of dropout in the classifier.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        width: int = 64,
        in_channels: int = 3,
        classes: int = 10,
        *,
        batch_norm: bool = False,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        channels = in_channels
        for group in groups:
            for factor in group:
                self.features.append(nn.Conv2d(channels, factor * width, 3, padding=1))
                channels = factor * width
                if batch_norm:
                    self.features.append(nn.BatchNorm2d(channels))
                self.features.append(nn.ReLU(inplace=True))
            self.features.append(nn.MaxPool2d(2))
        self.classifier = nn.Sequential(
            nn.Linear(channels, channels),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(channels, channels),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(channels, classes),
        )
        initialise_for_relu(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits


def vgg11(width: int = 64, in_channels: int = 3, classes: int = 10) -> VGG:
    """Return configuration A: eight convolutions and three linear layers.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`VGG`.

    Returns
    -------
    VGG
    """
    return VGG(VGG_11, width, in_channels, classes)


def vgg11_bn(width: int = 64, in_channels: int = 3, classes: int = 10) -> VGG:
    """Return configuration A with batch norm.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`VGG`.

    Returns
    -------
    VGG
    """
    return VGG(VGG_11, width, in_channels, classes, batch_norm=True)


def vgg16(width: int = 64, in_channels: int = 3, classes: int = 10) -> VGG:
    """Return configuration D: thirteen convolutions and three linear layers.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`VGG`.

    Returns
    -------
    VGG
    """
    return VGG(VGG_16, width, in_channels, classes)


def vgg16_bn(width: int = 64, in_channels: int = 3, classes: int = 10) -> VGG:
    """Return configuration D with batch norm.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`VGG`.

    Returns
    -------
    VGG
    """
    return VGG(VGG_16, width, in_channels, classes, batch_norm=True)
