"""CosmoFlow and STU-Net: convolutions in three dimensions."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn


class CosmoFlow(nn.Module):
    """Source: Mathuriya et al. 2018, CosmoFlow: using deep learning to learn the universe at scale, section III."""

    def __init__(self, in_channels: int = 2, width: int = 4, outputs: int = 3) -> None:
        super().__init__()
        widths = [in_channels, width, 2 * width, 4 * width]
        self.convolutions = nn.ModuleList(nn.Conv3d(c, f, 3, padding=1) for c, f in pairwise(widths))
        self.dense = nn.Sequential(
            nn.LazyLinear(16), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(16, 8), nn.LeakyReLU(), nn.Linear(8, outputs)
        )
        self.dense[0].initialize_parameters(torch.empty(1, 4 * width * 2 * 3 * 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the parameters of each universe (N, outputs) from its density (N, C, D, H, W)."""
        for convolution in self.convolutions:
            x = F.max_pool3d(F.leaky_relu(convolution(x)), 2)
        return cast(torch.Tensor, self.dense(x.flatten(1)))


class _Residual(nn.Module):
    """A block of figure 2; with a stride, its first convolution and the shortcut halve the sizes."""

    def __init__(self, channels: int, filters: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(channels, filters, 3, stride=stride, padding=1)
        self.norm1 = nn.InstanceNorm3d(filters, affine=True)
        self.conv2 = nn.Conv3d(filters, filters, 3, padding=1)
        self.norm2 = nn.InstanceNorm3d(filters, affine=True)
        self.shortcut = nn.Conv3d(channels, filters, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.leaky_relu(self.norm1(self.conv1(x)))
        return F.leaky_relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class STUNet(nn.Module):
    """Source: Huang et al. 2023, STU-Net, section 3: upsampling by interpolation, and a head at each resolution."""

    def __init__(self, in_channels: int = 1, classes: int = 3, widths: tuple[int, ...] = (4, 8, 12)) -> None:
        super().__init__()
        steps = list(pairwise(widths))
        self.enter = _Residual(in_channels, widths[0])
        self.down = nn.ModuleList(_Residual(c, f, stride=2) for c, f in steps)
        self.shrink = nn.ModuleList(nn.Conv3d(f, c, 1) for c, f in reversed(steps))
        self.up = nn.ModuleList(_Residual(2 * c, c) for c, _ in reversed(steps))
        self.heads = nn.ModuleList(nn.Conv3d(c, classes, 1) for c, _ in reversed(steps))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return scores of the classes at each resolution, the finest last."""
        kept = [self.enter(x)]
        for block in self.down:
            kept.append(block(kept[-1]))
        y, outputs = kept.pop(), []
        for shrink, block, head in zip(self.shrink, self.up, self.heads, strict=True):
            y = shrink(F.interpolate(y, scale_factor=2, mode="nearest"))
            y = block(torch.cat([y, kept.pop()], dim=1))
            outputs.append(head(y))
        return outputs
