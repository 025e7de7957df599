"""VGG-16 with batch norm, a classifier.

Source: Simonyan, Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015, table 1,
D, with kernels of 3^3, as trained on voxelised point clouds in Zhai et al., "SparsePipe: parallel deep learning for 3D
point clouds", IV. The features end with global max pooling, so that any resolution is possible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .layers import DENSE, SPARSE, Layers, convolution_block, initialise

VGG_16 = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Filters of each convolution as multiples of ``width``; a max pool of 2 ends each group."""


class VoxelVGG(nn.Module):
    """A classifier: a cloud of B samples to logits (B, classes).

    Parameters
    ----------
    layers : Layers
    width : int
        Filters of the first convolution.
    in_channels, classes : int
    hidden : int
        Features of the linear layers.
    """

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
    """Return the network on sparse tensors.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`VoxelVGG`.
    hidden : int, optional
        Features of the linear layers (default: 64 ``width``, which is 4096 as in the source).

    Returns
    -------
    VoxelVGG
    """
    return VoxelVGG(SPARSE, width, in_channels, classes, hidden or 64 * width)


def dense_vgg16_bn(width: int = 64, in_channels: int = 1, classes: int = 10, hidden: int | None = None) -> VoxelVGG:
    """Return the dense equivalent on volumes.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`VoxelVGG`.
    hidden : int, optional
        Features of the linear layers (default: 64 ``width``, which is 4096 as in the source).

    Returns
    -------
    VoxelVGG
    """
    return VoxelVGG(DENSE, width, in_channels, classes, hidden or 64 * width)
