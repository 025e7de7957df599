"""A two-dimensional U-Net for any image size.

Source: Ronneberger, Fischer, Brox, "U-Net: convolutional networks for biomedical image segmentation", MICCAI 2015;
here with padded convolutions, batch norm, and bilinear interpolation on the way up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class UNet(nn.Module):
    """x (N, in_channels, H, W) -> logits (N, classes, H, W).

    Level k works at 1/2^k of the resolution with ``width`` 2^k channels. An extent that does not divide is rounded
    down on the way down; on the way up each level is interpolated to the size of the skip connection it meets.
    """

    def __init__(self, in_channels: int = 18, classes: int = 1, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([in_channels, *widths], widths, strict=False))
        self.up = nn.ModuleList(_double(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.predict = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, double in enumerate(self.down):
            x = double(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for double in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=False)
            x = double(torch.cat([skip, x], 1))
        logits: torch.Tensor = self.predict(x)
        return logits


def _double(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


def unet(width: int = 16, in_channels: int = 18, classes: int = 1) -> UNet:
    """The U-Net for mesh tangling."""
    return UNet(in_channels, classes, width)
