"""VGG-16 with batch norm, a classifier.

Source: Simonyan, Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015, table 1,
D, with kernels of 3^3; as Zhai et al., "SparsePipe: parallel deep learning for 3D point clouds", IV, train it on
voxelised point clouds. Global max pooling ends the features, so that any resolution goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .layers import DENSE, SPARSE, Layers, convolution_block, initialise

VGG_16 = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Filters of each convolution as multiples of ``width``; a max pool of 2 ends each group."""


class VoxelVGG(nn.Module):
    """A cloud of B samples -> logits (B, classes); linear layers of ``hidden`` features."""

    def __init__(self, layers: Layers, width: int, in_channels: int, classes: int, hidden: int) -> None:
        super().__init__()
        self.features = nn.Sequential()
        channels = in_channels
        for group in VGG_16:
            for factor in group:
                self.features.extend(convolution_block(layers, channels, factor * width))
                channels = factor * width
            self.features.append(layers.max_pool(2))
        self.pool = layers.global_max()
        self.classifier = nn.Sequential(
            nn.Linear(channels, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, classes),
        )
        initialise(self)

    def forward(self, x: Any) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.pool(self.features(x)))
        return logits


def sparse_vgg16_bn(width: int = 64, in_channels: int = 1, classes: int = 10, hidden: int | None = None) -> VoxelVGG:
    """The sparse one; ``hidden`` is 64 ``width`` if left out, 4096 as in the source."""
    return VoxelVGG(SPARSE, width, in_channels, classes, hidden or 64 * width)


def dense_vgg16_bn(width: int = 64, in_channels: int = 1, classes: int = 10, hidden: int | None = None) -> VoxelVGG:
    """Its dense twin."""
    return VoxelVGG(DENSE, width, in_channels, classes, hidden or 64 * width)
