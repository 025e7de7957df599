"""Fully convolutional models for mesh tangling: six blocks of convolution, batch norm and ReLU.

Source: Dryden et al. 2019, VI. The paper does not state widths; the widths here reproduce its times and memory. Its
models predict at the resolution of the last block. Here the prediction is interpolated to the size of the input, one
logit for each cell.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BLOCKS = 6
"""Number of blocks, each of which halves the resolution."""


class Mesh(nn.Module):
    """Blocks of conv3x3-BN-ReLU: x (N, in_channels, H, W) to logits (N, classes, H, W), for any H and W.

    The first convolution of each block halves the resolution.

    Parameters
    ----------
    layers : int
        Convolutions in each block.
    width : int
        Channels of each convolution.
    in_channels, classes : int
    """

    def __init__(self, layers: int, width: int, in_channels: int = 18, classes: int = 1) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(_block(layers, in_channels if first else width, width) for first in (True,) + (False,) * (BLOCKS - 1))
        )
        self.predict = nn.Conv2d(width, classes, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        coarse = self.predict(self.blocks(x))
        return F.interpolate(coarse, size=x.shape[2:], mode="bilinear", align_corners=False)


def _block(layers: int, in_channels: int, width: int) -> nn.Sequential:
    block = nn.Sequential()
    for index in range(layers):
        first = index == 0
        # No bias, because the batch norm that follows would remove it.
        block.append(
            nn.Conv2d(in_channels if first else width, width, 3, stride=2 if first else 1, padding=1, bias=False)
        )
        block.append(nn.BatchNorm2d(width))
        block.append(nn.ReLU(inplace=True))
    return block


def mesh1k(width: int = 304, in_channels: int = 18, classes: int = 1) -> Mesh:
    """Return the model for samples of 1024x1024, with three layers in each block.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`Mesh`.

    Returns
    -------
    Mesh
    """
    return Mesh(3, width, in_channels, classes)


def mesh2k(width: int = 128, in_channels: int = 18, classes: int = 1) -> Mesh:
    """Return the model for samples of 2048x2048, with five layers in each block.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`Mesh`.

    Returns
    -------
    Mesh
    """
    return Mesh(5, width, in_channels, classes)
