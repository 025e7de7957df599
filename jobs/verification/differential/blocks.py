"""Blocks and heads of which networks are drawn."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from distconv.jobs.verification.differential.draw import Draw


class Residual(nn.Module):
    """x + its own convolution of x."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.convolution(x))


class SqueezeExcite(nn.Module):
    """Channels weighted by a function of their global means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, 2), nn.Linear(2, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = F.adaptive_avg_pool2d(x, 1).flatten(1)
        gate = torch.sigmoid(self.up(F.relu(self.down(means))))
        return x * gate[:, :, None, None]


class ExciteByMean(nn.Module):
    """The same with mean() and 1x1 convolutions, as some write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))


class Tied(nn.Module):
    """One convolution used twice, and its weight once more as it is."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.convolution(self.convolution(x)))
        return x * self.convolution.weight.mean() + F.conv2d(x, self.convolution.weight.flip(3), padding=1)


class Scaled(nn.Module):
    """Parameters that meet the tensor element by element."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.offset = nn.Parameter(torch.randn(channels, 1, 1))
        self.gate = nn.Parameter(torch.randn(1, channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.gate) * self.scale + self.offset


class Standardized(nn.Module):
    """A convolution whose weight is a function of its parameter."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.convolution.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 0.1)
        return F.conv2d(x, weight, self.convolution.bias, padding=1)


class UNet(nn.Module):
    """One level down and up, with a skip; the upsampled part is padded to the skip's size."""

    def __init__(self, channels: int, transposed: bool) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.up: nn.Module = nn.Conv2d(2 * channels, channels, 1)
        if transposed:
            self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.transposed = transposed
        self.merge = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.down(x))
        if self.transposed:
            y = self.up(y)
            y = F.pad(y, [0, x.shape[3] - y.shape[3], 0, x.shape[2] - y.shape[2]])
        else:
            y = F.interpolate(self.up(y), size=x.shape[2:], mode="bilinear", align_corners=False)
        return F.relu(self.merge(torch.cat([x, y], 1)))


class Checkpointed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


def _convolutions(draw: Draw, channels: int) -> nn.Module:
    kernel, stride = draw.number(1, 5), draw.pick(1, 1, 2)
    layers: list[nn.Module] = [nn.Conv2d(channels, channels, kernel, stride, kernel // 2, bias=draw.chance(0.7))]
    if draw.chance(0.5):
        layers.append(nn.BatchNorm2d(channels))
    return nn.Sequential(*layers, draw.pick(nn.ReLU, nn.GELU, nn.Tanh)())


BLOCKS: dict[str, Callable[[Draw, int], nn.Module]] = {
    "convolutions": _convolutions,
    "depthwise": lambda draw, c: nn.Sequential(nn.Conv2d(c, c, 3, padding=1, groups=c), nn.Conv2d(c, c, 1)),
    "residual": lambda draw, c: Residual(c),
    "squeeze-excite": lambda draw, c: SqueezeExcite(c),
    "excite by mean": lambda draw, c: ExciteByMean(c),
    "tied": lambda draw, c: Tied(c),
    "scaled": lambda draw, c: Scaled(c),
    "standardized": lambda draw, c: Standardized(c),
    "weight norm": lambda draw, c: weight_norm(nn.Conv2d(c, c, 3, padding=1)),
    "max pool": lambda draw, c: nn.MaxPool2d(draw.number(2, 3), draw.number(1, 2), 1),
    "average pool": lambda draw, c: nn.AvgPool2d(2, ceil_mode=True),
    "U-Net": lambda draw, c: UNet(c, draw.chance(0.5)),
    "checkpointed": lambda draw, c: Checkpointed(c),
    "PReLU": lambda draw, c: nn.PReLU(draw.pick(1, c)),
}

CLASSES = 3


class PixelHead(nn.Module):
    """Classes of every pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.last = nn.Conv2d(channels, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)  # type: ignore[no-any-return]


class LinearHead(nn.Module):
    """Classes of every sample: global pooling (one of three ways) and two linear layers."""

    def __init__(self, channels: int, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling
        self.first = nn.Linear(4 * channels if pooling == "flatten" else channels, 5)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pooling == "mean":
            pooled = x.mean((2, 3))
        elif self.pooling == "flatten":
            pooled = F.adaptive_avg_pool2d(x, 2).flatten(1)
        else:
            pooled = F.adaptive_avg_pool2d(x, 1).view(x.shape[0], -1)
        return self.last(F.relu(self.first(pooled)))  # type: ignore[no-any-return]
