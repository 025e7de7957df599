"""WaveNet and Conv-TasNet: dilated convolutions over the samples of a sound."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn


class WaveNet(nn.Module):
    """Source: van den Oord et al. 2016, WaveNet: a generative model for raw audio, section 2 and figure 4."""

    def __init__(self, classes: int = 8, width: int = 8, skip: int = 12, layers: int = 5, stacks: int = 2) -> None:
        super().__init__()
        self.dilations = [2**i for i in range(layers)] * stacks
        self.first = nn.Conv1d(classes, width, 2)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.dilations)
        self.residuals = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.dilations)
        self.skips = nn.ModuleList(nn.Conv1d(width, skip, 1) for _ in self.dilations)
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, classes, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores (N, classes, L) of the next sample at each of L times; ``x`` has the samples one-hot."""
        x = self.first(F.pad(x, (1, 0)))
        total = torch.zeros((), dtype=x.dtype)
        for dilation, gate, residual, skip in zip(self.dilations, self.gates, self.residuals, self.skips, strict=True):
            filtered, gated = gate(F.pad(x, (dilation, 0))).chunk(2, dim=1)
            z = torch.tanh(filtered) * torch.sigmoid(gated)  # equation 2
            x = x + residual(z)
            total = total + skip(z)
        return cast(torch.Tensor, self.last(total))


class _GlobalLayerNorm(nn.Module):
    """gLN: over channels and time (equations 9 to 11)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(channels, 1)), nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=(1, 2), keepdim=True)
        variance = ((x - mean) ** 2).mean(dim=(1, 2), keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-8) * self.gamma + self.beta


class _SeparableBlock(nn.Module):
    """A 1-D block of figure 1 C: a depthwise dilated convolution between two of size 1."""

    def __init__(self, bottleneck: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.depthwise = nn.Sequential(
            nn.Conv1d(bottleneck, hidden, 1), nn.PReLU(), _GlobalLayerNorm(hidden),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            nn.PReLU(), _GlobalLayerNorm(hidden),
        )  # fmt: skip
        self.residual, self.skip = nn.Conv1d(hidden, bottleneck, 1), nn.Conv1d(hidden, bottleneck, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.depthwise(x)
        return x + self.residual(y), self.skip(y)


class ConvTasNet(nn.Module):
    """Source: Luo and Mesgarani 2019, Conv-TasNet, section II."""

    def __init__(self, speakers: int = 2, filters: int = 16, bottleneck: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.speakers = speakers
        self.encoder = nn.Conv1d(1, filters, 8, stride=4, bias=False)
        self.enter = nn.Sequential(_GlobalLayerNorm(filters), nn.Conv1d(filters, bottleneck, 1))
        self.blocks = nn.ModuleList(_SeparableBlock(bottleneck, hidden, 2**i) for _ in range(2) for i in range(3))
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(bottleneck, speakers * filters, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(filters, 1, 8, stride=4, bias=False)

    def forward(self, mixture: torch.Tensor) -> torch.Tensor:
        """Return the sound (N, speakers, L) of each speaker in the mixture (N, 1, L)."""
        w = self.encoder(mixture)
        x, skips = self.enter(w), []
        for block in self.blocks:
            x, skip = block(x)
            skips.append(skip)
        masks = self.mask(sum(skips)).view(len(w), self.speakers, *w.shape[1:])
        masked = (w.unsqueeze(1) * masks).flatten(0, 1)  # equation 5
        return cast(torch.Tensor, self.decoder(masked).view(len(w), self.speakers, -1))
