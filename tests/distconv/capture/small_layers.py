"""Time of layers with little work, eager and captured, relative to plain torch: ``python -m`` this, with a grid.

    mpiexec -n 2 python -m mpi4py -m tests.distconv.capture.small_layers h=2

20 x (convolution of 4 channels, batch norm, ReLU) on 2 x 4 x 8 x 8, forward and backward, one thread a rank; the three
take turns, and each starts behind a barrier. On a GPU if there is one, where each waits for it at its end.
"""

from __future__ import annotations

import statistics
import sys

import torch
from torch import nn

import distconv as dc
from distconv.jobs.timing import time_interleaved, timed_variants

LAYERS, TURNS = 20, 60


def network() -> nn.Sequential:
    """The stack."""
    blocks = ((nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(LAYERS))
    return nn.Sequential(*(module for block in blocks for module in block))


def main(grid: dc.ProcessGrid) -> None:
    """Measure and print, on rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = dc.device()
    model, plain = dc.parallelize(network().to(device), grid), network().to(device)
    whole = torch.randn(2, 4, 8, 8).to(device)
    x = dc.scatter(whole, grid)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    captured = dc.capture(step, x)
    ways = {
        "eager": lambda: (model.zero_grad(), step(x)),
        "captured": lambda: (model.zero_grad(), captured(x)),
        "plain torch": lambda: (plain.zero_grad(), plain(whole).sum().backward()),
    }
    times = time_interleaved(grid.world, timed_variants(ways, device), TURNS, warm_up=5)
    if grid.rank == 0:
        torchs = statistics.median(times["plain torch"]) * 1e6 / (3 * LAYERS)
        print(f"{grid.describe()}, us a module: median (min to max), over plain torch")
        for name, seconds in times.items():
            found = [1e6 * each / (3 * LAYERS) for each in seconds]
            median = statistics.median(found)
            print(f"{name:<12}{median:8.1f} ({min(found):.1f} to {max(found):.1f}) {median / torchs:.2f}")


if __name__ == "__main__":
    main(dc.ProcessGrid(**dc.parse_grid(sys.argv[1])))
