"""A U-Net that labels each site.

Source: Çiçek et al., "3D U-Net: learning dense volumetric segmentation from sparse annotation", MICCAI 2016.
Differences: the encoder has convolutions of stride 2, and the decoder transposed convolutions back to the same sites.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from .layers import DENSE, SPARSE, Layers, convolution_block, initialise


class VoxelUNet(nn.Module):
    """A U-Net: a cloud to logits for each of its sites, with ``classes`` channels.

    Level k works at 1/2^k of the resolution with ``width`` 2^k channels.

    Parameters
    ----------
    layers : Layers
    width : int
        Channels of the first level.
    in_channels, classes : int
    depth : int
        Number of levels below the first.
    """

    def __init__(self, layers: Layers, width: int, in_channels: int, classes: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        steps = list(itertools.pairwise(widths))
        self.first = _double_convolution(layers, in_channels, width)
        self.down = nn.ModuleList(
            nn.Sequential(convolution_block(layers, a, b, 2, 2), _double_convolution(layers, b, b)) for a, b in steps
        )
        self.up = nn.ModuleList(
            nn.Sequential(layers.transposed(b, a, 2, 2, False), layers.norm(a), nn.ReLU(inplace=True))
            for a, b in reversed(steps)
        )
        self.merge = nn.ModuleList(_double_convolution(layers, 2 * a, a) for a, _ in reversed(steps))
        self.predict = layers.convolution(width, classes, 1, 1, True)
        initialise(self)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        # The transposed convolution returns to the sites of its skip connection, so their features can be concatenated.
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.predict(x)


def _double_convolution(layers: Layers, in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        convolution_block(layers, in_channels, channels), convolution_block(layers, channels, channels)
    )


def sparse_unet(width: int = 16, in_channels: int = 1, classes: int = 2, depth: int = 3) -> VoxelUNet:
    """Return the network on sparse tensors.

    Parameters
    ----------
    width, in_channels, classes, depth : int
        As in :class:`VoxelUNet`.

    Returns
    -------
    VoxelUNet
    """
    return VoxelUNet(SPARSE, width, in_channels, classes, depth)


def dense_unet(width: int = 16, in_channels: int = 1, classes: int = 2, depth: int = 3) -> VoxelUNet:
    """Return the dense equivalent on volumes.

    Parameters
    ----------
    width, in_channels, classes, depth : int
        As in :class:`VoxelUNet`.

    Returns
    -------
    VoxelUNet
    """
    return VoxelUNet(DENSE, width, in_channels, classes, depth)
