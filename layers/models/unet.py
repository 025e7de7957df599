"""U-Nets for images and volumes of any size.

Source: Ronneberger, Fischer, Brox, "U-Net: convolutional networks for biomedical image segmentation", MICCAI 2015, and
Çiçek et al., "3D U-Net", MICCAI 2016. Differences: padded convolutions, batch norm, and linear interpolation in the
decoder.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class _Layers(NamedTuple):
    """The layers that depend on the number of spatial dimensions."""

    convolution: Any
    norm: Any
    pool: Any
    mode: str


_LAYERS = {
    2: _Layers(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, "bilinear"),
    3: _Layers(nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, "trilinear"),
}


class UNet(nn.Module):
    """A U-Net: x (N, in_channels, [D,] H, W) to logits (N, classes, [D,] H, W).

    Level k works at 1/2^k of the resolution with ``width`` 2^k channels. In the encoder odd sizes are rounded down. In
    the decoder each level is interpolated to the size of its skip connection.

    Parameters
    ----------
    in_channels, classes : int
    width : int
        Channels of the first level.
    depth : int
        Number of levels below the first.
    dimensions : int
        Spatial dimensions, 2 or 3.
    """

    def __init__(
        self, in_channels: int = 18, classes: int = 1, width: int = 16, depth: int = 3, dimensions: int = 2
    ) -> None:
        super().__init__()
        layers = _LAYERS[dimensions]
        widths = [width << level for level in range(depth + 1)]
        steps_up = zip(widths[:0:-1], widths[-2::-1], strict=True)
        self.down = nn.ModuleList(
            _double_convolution(layers, a, b) for a, b in zip([in_channels, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(_double_convolution(layers, a + b, b) for a, b in steps_up)
        self.predict = layers.convolution(width, classes, 1)
        self.pool = layers.pool(2)
        self.mode = layers.mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, double in enumerate(self.down):
            x = double(self.pool(x) if level else x)
            skips.append(x)
        # The deepest level is the decoder's input, not a skip connection.
        skips.pop()
        for double in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[2:], mode=self.mode, align_corners=False)
            x = double(torch.cat([skip, x], 1))
        logits: torch.Tensor = self.predict(x)
        return logits


def _double_convolution(layers: _Layers, in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        layers.convolution(in_channels, channels, 3, padding=1, bias=False),
        layers.norm(channels),
        nn.ReLU(inplace=True),
        layers.convolution(channels, channels, 3, padding=1, bias=False),
        layers.norm(channels),
        nn.ReLU(inplace=True),
    )


def unet(width: int = 16, in_channels: int = 18, classes: int = 1) -> UNet:
    """Return the U-Net for mesh tangling.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`UNet`.

    Returns
    -------
    UNet
    """
    return UNet(in_channels, classes, width)


def unet3d(width: int = 16, in_channels: int = 1, classes: int = 2) -> UNet:
    """Return the U-Net for volumes.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`UNet`.

    Returns
    -------
    UNet
    """
    return UNet(in_channels, classes, width, dimensions=3)
