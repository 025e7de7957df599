"""Blocks of networks as users write them: residual, squeeze-and-excitation, U-Net, checkpointed and others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    """The input plus a convolution of it."""

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
    """Squeeze-and-excitation with ``mean()`` and a 1x1 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))


class Tied(nn.Module):
    """A convolution that is used twice, and whose weight is used directly: all three uses add to one gradient."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.convolution(self.convolution(x)))
        return x * self.convolution.weight.mean() + F.conv2d(x, self.convolution.weight.flip(3), padding=1)


class Scaled(nn.Module):
    """Parameters that scale and shift the tensor elementwise."""

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


class SmallUNet(nn.Module):
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


class ScaledResidual(nn.Module):
    """x + gamma * block(x) with one gamma per channel, in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GELU())
        self.gamma = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        y *= self.gamma
        y += x
        return F.relu(y, inplace=True)


class CroppedSkip(nn.Module):
    """The original U-Net's skip: valid convolutions, and the skip cropped to the size of the upsampled tensor."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, 2 * channels, 3)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.merge = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(F.relu(self.down(F.max_pool2d(x, 2))))
        top, left = (x.shape[2] - y.shape[2]) // 2, (x.shape[3] - y.shape[3]) // 2
        skip = x[:, :, top : top + y.shape[2], left : left + y.shape[3]]
        return self.merge(torch.cat([skip, y], 1))  # type: ignore[no-any-return]


class Inverted(nn.Module):
    """MobileNet's block: wide, depthwise with stride, narrow again; batch norm and ReLU6 between."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 3 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride=2, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, channels, 1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class ChannelAttention(nn.Module):
    """CBAM: gates from global means and maxima, then from the channels' mean and maximum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(channels, 2, 1), nn.ReLU(), nn.Conv2d(2, channels, 1))
        self.space = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)) + self.gate(F.adaptive_max_pool2d(x, 1)))
        both = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * torch.sigmoid(self.space(both))


class Pyramid(nn.Module):
    """PSPNet's pooling: means over several grids, resized and joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(channels, 2, 1) for _ in range(2))
        self.sizes = (1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x]
        for size, branch in zip(self.sizes, self.branches, strict=True):
            y = branch(F.adaptive_avg_pool2d(x, size))
            parts.append(F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False))
        return torch.cat(parts, 1)


def convolution(channels: int) -> nn.Conv2d:
    """Return a convolution that keeps the number of channels and the spatial size."""
    return nn.Conv2d(channels, channels, 3, padding=1)


def batch_normed(channels: int) -> nn.Module:
    """Return a convolution, batch norm and ReLU."""
    return nn.Sequential(convolution(channels), nn.BatchNorm2d(channels), nn.ReLU())


BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "residual block": Residual,
    "scaled residual block, in place": ScaledResidual,
    "squeeze and excitation, linear layers": SqueezeExcite,
    "squeeze and excitation, 1x1 convolutions": ExciteByMean,
    "CBAM": ChannelAttention,
    "inverted residual block": Inverted,
    "U-Net skip, padded": lambda channels: SmallUNet(channels, True),
    "U-Net skip, bilinear": lambda channels: SmallUNet(channels, False),
    "checkpointed block": Checkpointed,
    "tied weights": Tied,
    "scaled by parameters": Scaled,
    "weight norm": lambda channels: weight_norm(convolution(channels)),
    "spectral norm": lambda channels: spectral_norm(convolution(channels)),
    "weight standardization": Standardized,
    "depthwise, 1x1": lambda c: nn.Sequential(nn.Conv2d(c, c, 3, padding=1, groups=c), nn.Conv2d(c, c, 1)),
    "conv, batch norm, ReLU": batch_normed,
}
"""Blocks of a number of channels, which they keep, so that differential tests can draw a sequence of them."""
