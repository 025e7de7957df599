"""The step that ``distconv bench step`` times, in plain torch; run as a program it is the reference process.

Arguments: kind of layer, size, channels, layers, batch, threads. It reads a number of steps per line and answers with
their seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

HEADS = 4
"""Number of attention heads."""


class Attention(nn.Module):
    """Attention of every pixel to all pixels, with a residual connection, as in a vision transformer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output (N, C, H, W) for the input (N, C, H, W)."""
        n, c, h, w = x.shape
        parts = self.qkv(x.flatten(2).transpose(1, 2)).reshape(n, h * w, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2]).transpose(1, 2).reshape(n, h * w, c)
        mixed: torch.Tensor = self.out(y)
        return x + mixed.transpose(1, 2).reshape(n, c, h, w)


class GlobalFilter(nn.Module):
    """Each channel's spectrum times weights, with a residual connection: a convolution as wide as the sample.

    Source: Rao et al. 2021, Global Filter Networks, 3.2.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, size, size // 2 + 1, 2) / size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output (N, C, H, W) for the input (N, C, H, W)."""
        filtered: torch.Tensor = torch.fft.irfft2(
            torch.fft.rfft2(x) * torch.view_as_complex(self.weight), s=x.shape[2:]
        )
        return x + filtered


KINDS = {
    "convolution": "conv 3x3 + ReLU",
    "attention": f"attention over all pixels, {HEADS} heads",
    "fourier": "rfft2, product with weights, irfft2",
}
"""Kinds of layers."""


def build(kind: str, size: int, channels: int, layers: int, batch: int) -> tuple[nn.Module, torch.Tensor]:
    """Return the model and its input (batch, channels, size, size), float32, seeded.

    Parameters
    ----------
    kind : str
        Type of the layers.
    size : int
        Height and width of the sample.
    channels : int
        Input and output channels.
    layers : int
        Number of layers.
    batch : int
        Samples of a mini-batch.

    Returns
    -------
    (torch.nn.Module, torch.Tensor)
    """
    torch.manual_seed(0)
    make: Callable[[], nn.Module] = {
        "convolution": lambda: nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()),
        "attention": lambda: Attention(channels),
        "fourier": lambda: GlobalFilter(channels, size),
    }[kind]
    return nn.Sequential(*(make() for _ in range(layers))), torch.randn(batch, channels, size, size)


def step(model: nn.Module, x: torch.Tensor) -> None:
    """Run forward and backward, with gradients of the weights.

    Parameters
    ----------
    model : torch.nn.Module
    x : torch.Tensor
    """
    for parameter in model.parameters():
        parameter.grad = None
    model(x).sum().backward()


def main() -> None:
    """Take the requested numbers of steps until a request is 0."""
    kind, *numbers = sys.argv[1:]
    *sizes, threads = map(int, numbers)
    torch.set_num_threads(threads)
    model, x = build(kind, *sizes)
    while count := int(sys.stdin.readline() or 0):
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step(model, x)
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
