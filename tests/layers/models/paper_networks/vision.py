"""VMamba: selective scans of an image in four directions."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn


class _SelectiveScan2d(nn.Module):
    """SS2D (section 4.3): scan the pixels by rows and by columns, in both directions, and merge the results."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.states = states
        self.project = nn.ModuleList(nn.Linear(channels, channels + 2 * states) for _ in range(4))
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(4, channels, 1))
        self.skip = nn.Parameter(torch.ones(4, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, C, H, W) from (N, C, H, W)."""
        rows = x.flatten(2).transpose(1, 2)
        columns = x.transpose(2, 3).flatten(2).transpose(1, 2)
        y = [self.scan(i, u) for i, u in enumerate((rows, columns, rows.flip(1), columns.flip(1)))]
        by_rows, by_columns = y[0] + y[2].flip(1), y[1] + y[3].flip(1)
        n, c, h, w = x.shape
        return by_rows.transpose(1, 2).view(n, c, h, w) + by_columns.transpose(1, 2).view(n, c, w, h).transpose(2, 3)

    def scan(self, direction: int, u: torch.Tensor) -> torch.Tensor:
        """Return the selective scan of a sequence (N, L, C).

        Equation 4 for all times at once: the state at t has the input of s <= t times the decay between s and t.
        """
        delta, b, c = self.project[direction](u).split((u.shape[2], self.states, self.states), dim=2)
        delta = F.softplus(delta)
        decay = (delta.unsqueeze(3) * -torch.exp(self.log_a[direction])).cumsum(1)  # (N, L, C, states)
        between = (decay.unsqueeze(2) - decay.unsqueeze(1)).permute(0, 3, 4, 1, 2)  # (N, C, states, t, s)
        length = u.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = torch.exp(between.masked_fill(future, float("-inf")))
        y = torch.einsum("ncmts,nsc,nsm,ntm->ntc", weights, delta * u, b, c)
        return y + u * self.skip[direction]


class _Block(nn.Module):
    """A VSS block (figure 3 d): the scan between a gate's halves, and a network of two layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.norm_out, self.norm_mlp = (nn.LayerNorm(channels) for _ in range(3))
        self.enter = nn.Linear(channels, channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.scan = _SelectiveScan2d(channels, 2)
        self.leave = nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, H, W, C) from (N, H, W, C)."""
        y = self.enter(self.norm(x)).permute(0, 3, 1, 2).contiguous()
        y = self.scan(F.silu(self.depthwise(y))).permute(0, 2, 3, 1)
        x = x + self.leave(self.norm_out(y))
        return cast(torch.Tensor, x + self.mlp(self.norm_mlp(x)))


class VMamba(nn.Module):
    """Source: Liu et al. 2024, VMamba: visual state space model."""

    def __init__(self, in_channels: int = 3, widths: tuple[int, ...] = (8, 12), classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, widths[0], 4, stride=4)
        self.stages = nn.ModuleList(_Block(width) for width in widths)
        self.downsample = nn.Conv2d(widths[0], widths[1], 3, stride=2, padding=1)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores (N, classes) of images."""
        x = self.stages[0](self.stem(x).permute(0, 2, 3, 1))
        x = self.stages[1](self.downsample(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return cast(torch.Tensor, self.head(self.norm(x).mean(dim=(1, 2))))
