"""Networks with most kinds of operations, and a machine whose numbers all differ, for approved numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from distconv.perfmodel.machine.links import Link
from distconv.perfmodel.machine.machine import Compute, Machine, Overlap, Roofline


class Flat(nn.Module):
    """Convolutions of all kinds, norms, pooling, interpolation, a branch, a layer that is called twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, (4, 3), (2, 1), (1, 2), bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.groups = nn.GroupNorm(4, 8)
        self.each = nn.InstanceNorm2d(8, affine=True)
        self.shrink = nn.Conv2d(16, 6, 1)
        self.up = nn.ConvTranspose2d(6, 5, (2, 3), 2, (0, 1))
        self.head = nn.Linear(5 * 2 * 3, 7)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        y = F.dropout(self.groups(self.grouped(x)), 0.1, self.training)
        y = F.gelu(self.each(self.grouped(y)))
        x = self.shrink(torch.cat([x, y], 1))
        x = F.max_pool2d(F.interpolate(x, scale_factor=2, mode="bilinear"), 3, 2, 1)
        x = F.leaky_relu_(self.up(x))
        x = F.adaptive_avg_pool2d(x, (2, 3)).flatten(1)
        return F.log_softmax(self.head(x) * self.scale, 1)


class Deep(nn.Module):
    """A volume with two branches of different kernels, and a mean over space."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 4, 3, padding=1)
        self.left = nn.Conv3d(4, 6, (1, 3, 5), padding=(0, 1, 2))
        self.right = nn.Sequential(nn.Conv3d(4, 6, 1), nn.ReLU())
        self.last = nn.Conv3d(6, 3, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool3d(torch.tanh(self.first(x)), 2)
        return self.last(self.left(x) + self.right(x)).mean((2, 3, 4))


NETWORKS = {"flat": (Flat, (4, 3, 18, 20)), "deep": (Deep, (2, 2, 8, 12, 16))}
GRIDS = {
    "flat": ({"n": 4}, {"h": 4}, {"w": 2}, {"h": 2, "w": 2}, {"n": 2, "h": 2}, {"c": 2}, {"c": 2, "w": 2}),
    "deep": ({"n": 2}, {"d": 2}, {"d": 2, "h": 2}, {"w": 4}, {"n": 2, "w": 2}, {"c": 2}),
}


def uneven_machine(*, overlap: bool = True) -> Machine:
    """Return two nodes of two ranks on which nothing is free and no two numbers are equal."""
    return Machine(
        name="uneven",
        ranks_per_node=2,
        memory_bytes=3e8,
        node=Link(2e-6, 3e9),
        network=Link(7e-6, 4e8),
        overlap=Overlap(overlap, overlap),
        compute=(
            Compute(1, Roofline(5e9, 6e9, 1.1e-6, small=900.0, exchange_s=1.3e-5, gradient_s=1.7e-6)),
            Compute(2, Roofline(4e9, 5e9, 1.9e-6, small=800.0, exchange_s=2.3e-5, gradient_s=2.9e-6, unfilled=0.6)),
        ),
    )


def digits(value: float) -> str:
    """Return five significant digits."""
    return f"{value:.5g}"
