"""ResNet-20, 56 and 110 for CIFAR.

Source: He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016, 4.2 and table 6: 0.27 M, 0.85 M
and 1.7 M parameters. Shortcuts are the paper's option A, without parameters: every second row and column, and zeros
for the channels that the block adds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .initialisation import initialise_for_relu


class BasicBlock(nn.Module):
    """A block: x (N, in_channels, H, W) to (N, channels, H/stride, W/stride), sizes rounded up."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride, self.added = stride, channels - in_channels
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))

    def shortcut(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, subsampled and padded with zero channels as in the paper's option A."""
        if self.stride > 1:
            x = F.avg_pool2d(x, 1, self.stride)  # windows of one: every stride-th row and column
        return F.pad(x, (0, 0, 0, 0, 0, self.added)) if self.added else x


class CifarResNet(nn.Module):
    """A ResNet for CIFAR: x (N, in_channels, H, W) to logits (N, classes), for any H and W.

    Parameters
    ----------
    blocks : int
        Blocks in each of three stages; the network has 6 ``blocks`` + 2 layers.
    width : int
        Channels of the first convolution.
    in_channels, classes : int
    """

    def __init__(self, blocks: int, width: int = 16, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(blocks, width, width, stride=1)
        self.layer2 = _stage(blocks, width, 2 * width, stride=2)
        self.layer3 = _stage(blocks, 2 * width, 4 * width, stride=2)
        self.fc = nn.Linear(4 * width, classes)
        initialise_for_relu(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: torch.Tensor = self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits


def _stage(blocks: int, in_channels: int, channels: int, stride: int) -> nn.Sequential:
    rest = (BasicBlock(channels, channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(BasicBlock(in_channels, channels, stride), *rest)


def resnet20(width: int = 16, in_channels: int = 3, classes: int = 10) -> CifarResNet:
    """Return ResNet-20, with three stages of three blocks.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`CifarResNet`.

    Returns
    -------
    CifarResNet
    """
    return CifarResNet(3, width, in_channels, classes)


def resnet56(width: int = 16, in_channels: int = 3, classes: int = 10) -> CifarResNet:
    """Return ResNet-56, with three stages of nine blocks.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`CifarResNet`.

    Returns
    -------
    CifarResNet
    """
    return CifarResNet(9, width, in_channels, classes)


def resnet110(width: int = 16, in_channels: int = 3, classes: int = 10) -> CifarResNet:
    """Return ResNet-110, with three stages of eighteen blocks.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`CifarResNet`.

    Returns
    -------
    CifarResNet
    """
    return CifarResNet(18, width, in_channels, classes)
