"""ResNet-50, fully convolutional: the last linear layer is a 1x1 convolution after global average pooling.

Source: He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016, table 1, 25.6 M parameters. As
in torchvision, the stride is at a block's 3x3 convolution, and layers have torchvision's names, except that ``fc`` is
``classifier``. Fully convolutional as in Dryden et al. 2019, VI.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .initialisation import initialise_for_relu

BLOCKS = (3, 4, 6, 3)
"""Blocks of each stage."""
EXPANSION = 4
"""Output channels of a block divided by its inner channels."""


class Bottleneck(nn.Module):
    """A block: x (N, in_channels, H, W) to (N, 4 channels, H/stride, W/stride), sizes rounded up."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = EXPANSION * channels
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            projection = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        shortcut = x if self.downsample is None else self.downsample(x)
        result: torch.Tensor = self.relu(y + shortcut)
        return result


class ResNet50(nn.Module):
    """ResNet-50: x (N, in_channels, H, W) to logits (N, classes), for any H and W.

    Parameters
    ----------
    width : int
        Channels of the first convolution.
    in_channels, classes : int
    """

    def __init__(self, width: int = 64, in_channels: int = 3, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(BLOCKS[0], width, width, stride=1)
        self.layer2 = _stage(BLOCKS[1], 4 * width, 2 * width, stride=2)
        self.layer3 = _stage(BLOCKS[2], 8 * width, 4 * width, stride=2)
        self.layer4 = _stage(BLOCKS[3], 16 * width, 8 * width, stride=2)
        self.classifier = nn.Conv2d(32 * width, classes, 1)
        initialise_for_relu(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return torch.flatten(self.classifier(F.adaptive_avg_pool2d(x, 1)), 1)


def _stage(blocks: int, in_channels: int, channels: int, stride: int) -> nn.Sequential:
    rest = (Bottleneck(EXPANSION * channels, channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(in_channels, channels, stride), *rest)


def resnet50(width: int = 64, in_channels: int = 3, classes: int = 1000) -> ResNet50:
    """Return ResNet-50.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`ResNet50`.

    Returns
    -------
    ResNet50
    """
    return ResNet50(width, in_channels, classes)
