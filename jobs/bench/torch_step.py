"""The step that ``distconv bench step`` times, in plain torch; run as a program it is the reference process.

Arguments: size, channels, layers, batch, threads. It reads a number of steps per line and answers with their seconds.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn


def build(size: int, channels: int, layers: int, batch: int) -> tuple[nn.Module, torch.Tensor]:
    """The model and its input (batch, channels, size, size), float32, seeded."""
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*blocks), torch.randn(batch, channels, size, size)


def step(model: nn.Module, x: torch.Tensor) -> None:
    """Forward and backward to the weights."""
    for parameter in model.parameters():
        parameter.grad = None
    model(x).sum().backward()


def main() -> None:
    """Serve requests until one says 0."""
    size, channels, layers, batch, threads = (int(a) for a in sys.argv[1:])
    torch.set_num_threads(threads)
    model, x = build(size, channels, layers, batch)
    while count := int(sys.stdin.readline() or 0):
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step(model, x)
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
