"""A ResNet-18-like classifier: four stages of two basic blocks, all but the first with a stride of 2.

Source: He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016, table 1, 18 layers, with kernels
of 3^3. The first convolution keeps the resolution, because that of voxels is low. The features end with global max
pooling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .layers import DENSE, SPARSE, Layers, convolution_block, initialise


class SparseBasicBlock(nn.Module):
    """Two convolutions and a shortcut, which is projected if channels or resolution change."""

    def __init__(self, layers: Layers, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = convolution_block(layers, in_channels, channels, stride=stride)
        self.second = nn.Sequential(layers.convolution(channels, channels, 3, 1, False), layers.norm(channels))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != channels:
            projection = layers.convolution(in_channels, channels, 1, stride, False)
            self.shortcut = nn.Sequential(projection, layers.norm(channels))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        return self.relu(self.second(self.first(x)) + self.shortcut(x))


class VoxelResNet(nn.Module):
    """A classifier: a cloud of B samples to logits (B, classes).

    Parameters
    ----------
    layers : Layers
    width : int
        Channels of the first stage.
    in_channels, classes : int
    """

    def __init__(self, layers: Layers, width: int, in_channels: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(convolution_block(layers, in_channels, width))
        channels = width
        for stage, factor in enumerate((1, 2, 4, 8)):
            for block in range(2):
                stride = 2 if stage and not block else 1
                self.features.append(SparseBasicBlock(layers, channels, factor * width, stride))
                channels = factor * width
        self.pool = layers.global_max()
        self.classifier = nn.Linear(channels, classes)
        initialise(self)

    def forward(self, x: Any) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.pool(self.features(x)))
        return logits


def sparse_resnet(width: int = 32, in_channels: int = 1, classes: int = 10) -> VoxelResNet:
    """Return the network on sparse tensors.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`VoxelResNet`.

    Returns
    -------
    VoxelResNet
    """
    return VoxelResNet(SPARSE, width, in_channels, classes)


def dense_resnet(width: int = 32, in_channels: int = 1, classes: int = 10) -> VoxelResNet:
    """Return the dense equivalent on volumes.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`VoxelResNet`.

    Returns
    -------
    VoxelResNet
    """
    return VoxelResNet(DENSE, width, in_channels, classes)
