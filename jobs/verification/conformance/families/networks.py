"""Blocks of networks as users write them: residual, squeeze-and-excitation, U-Net, checkpointed, and their kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from distconv.jobs.verification.conformance.case import Case, Input, Sizes, modules
from distconv.jobs.verification.differential import blocks

_X = Input("N C H W")
_Forward = Callable[[torch.Tensor], torch.Tensor]


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
    """The original U-Net's skip: valid convolutions, the skip cropped to what came up."""

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


def _convolution(sizes: Sizes) -> nn.Conv2d:
    return nn.Conv2d(sizes["c"], sizes["c"], 3, padding=1)


def _frozen_first(sizes: Sizes) -> nn.Module:
    module = nn.Sequential(_convolution(sizes), nn.ReLU(), _convolution(sizes))
    module[0].requires_grad_(False)
    return module


def _no_grad_first(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = module.children()
    with torch.no_grad():
        x = first(x)
    return second(x)  # type: ignore[no-any-return]


def _sequential(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Checkpointed at a batch norm, which runs twice."""
    return checkpoint(module, x, use_reentrant=False) + x  # type: ignore[no-any-return]


def _batch_normed(sizes: Sizes) -> nn.Module:
    return nn.Sequential(_convolution(sizes), nn.BatchNorm2d(sizes["c"]), nn.ReLU())


_LEAST = {"h": 2, "w": 2}

_BLOCKS: dict[tuple[str, str], tuple[Callable[[Sizes], nn.Module], dict[str, Any]]] = {
    ("residual block", ""): (lambda sizes: blocks.Residual(sizes["c"]), {}),
    ("scaled residual block", "in place"): (lambda sizes: ScaledResidual(sizes["c"]), {}),
    ("squeeze and excitation", "linear layers"): (lambda sizes: blocks.SqueezeExcite(sizes["c"]), {}),
    ("squeeze and excitation", "1x1 convolutions"): (lambda sizes: blocks.ExciteByMean(sizes["c"]), {}),
    ("CBAM", ""): (lambda sizes: ChannelAttention(sizes["c"]), {}),
    ("inverted residual block", ""): (lambda sizes: Inverted(sizes["c"]), {"least": _LEAST}),
    ("U-Net skip", "padded"): (lambda sizes: blocks.UNet(sizes["c"], True), {"least": _LEAST}),
    ("U-Net skip", "bilinear"): (lambda sizes: blocks.UNet(sizes["c"], False), {"least": _LEAST}),
    ("U-Net skip", "cropped"): (lambda sizes: CroppedSkip(sizes["c"]), {"least": {"h": 6, "w": 6}, "sizes": {"h": 8}}),
    ("pyramid pooling", ""): (lambda sizes: Pyramid(sizes["c"]), {}),
    ("checkpointed block", ""): (lambda sizes: blocks.Checkpointed(sizes["c"]), {}),
    ("checkpointed block", "batch norm"): (_batch_normed, {"function": _sequential, "least": _LEAST}),
    ("tied weights", ""): (lambda sizes: blocks.Tied(sizes["c"]), {}),
    ("weight norm", ""): (lambda sizes: weight_norm(_convolution(sizes)), {}),
    ("spectral norm", ""): (lambda sizes: spectral_norm(_convolution(sizes)), {}),
    ("weight standardization", ""): (lambda sizes: blocks.Standardized(sizes["c"]), {}),
    ("frozen layer", ""): (_frozen_first, {}),
    ("layer without gradient", ""): (
        lambda sizes: nn.Sequential(_convolution(sizes), _convolution(sizes)),
        {"function": _no_grad_first},
    ),
    ("conv, batch norm, ReLU", ""): (_batch_normed, {"least": _LEAST}),
}

CASES: tuple[Case, ...] = tuple(
    one
    for (name, option), (build, attributes) in _BLOCKS.items()
    for one in modules(name, option, build, _X, **attributes)
)
