"""Find events in long recordings with a convolutional network; the time axis is split over ranks.

    mpiexec -n 2 distconv run examples/long_sequence.py --grid w=2

An event is a chirp after a click thousands of samples earlier, so the network needs a large receptive field.
"""

import argparse

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"w": MPI.COMM_WORLD.size})
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--length", type=int, default=32768)
options = parser.parse_args()

DELAY, CHIRP = 1500, 256


def recordings(count, seed):
    """Return signals (count, 1, length) and labels: 1 at chirps after a click, which half of the chirps have."""
    random = torch.Generator().manual_seed(seed)
    signal = 0.3 * torch.randn(count, 1, options.length, generator=random)
    labels = torch.zeros(count, options.length)
    time = torch.arange(CHIRP)
    chirp = torch.sin(0.002 * time.square()) * torch.sin(torch.pi * time / CHIRP)
    each = 2 * (DELAY + CHIRP)
    for sample in range(count):
        for begin in range(0, options.length - each, each):
            at = begin + DELAY + int(torch.randint(DELAY, (1,), generator=random))
            signal[sample, 0, at : at + CHIRP] += chirp
            if torch.rand(1, generator=random) < 0.5:
                signal[sample, 0, at - DELAY : at - DELAY + 8] += 4
                labels[sample, at : at + CHIRP] = 1
    return signal, labels


class Block(nn.Module):
    """A residual block with a dilated convolution; each block doubles the receptive field."""

    def __init__(self, channels, dilation):
        super().__init__()
        self.wide = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.mix = nn.Conv1d(channels, channels, 1)
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x):
        """Return a sequence of the length of ``x``."""
        return x + self.mix(F.gelu(self.norm(self.wide(x))))


device = dc.device()
grid = dc.ProcessGrid(MPI.COMM_WORLD, **options.grid)
torch.manual_seed(0)
blocks = [Block(16, 2**exponent) for exponent in range(11)]
model = nn.Sequential(nn.Conv1d(1, 16, 9, padding=4), *blocks, nn.Conv1d(16, 1, 1))
model = dc.parallelize(model.to(device), grid)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=options.steps)

losses = []
for step in range(options.steps):
    signal, labels = recordings(2, seed=step)
    x, wanted = dc.scatter(signal.to(device), grid), dc.scatter(labels.to(device), grid, dims="nw")
    loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())

model.eval()
signal, labels = recordings(4, seed=-1)
with torch.no_grad():
    found = dc.gather(model(dc.scatter(signal.to(device), grid)).squeeze(1)).cpu() > 0
hit, alarm = (found & (labels == 1)).sum(), (found & (labels == 0)).sum()
if grid.rank == 0:
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    print(f"held out: recall {hit / labels.sum():.3f}, precision {hit / (hit + alarm).clamp(min=1):.3f}")
