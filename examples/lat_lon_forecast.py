"""Forecast a tracer in winds on a latitude-longitude grid, with circular padding along the longitude.

    mpiexec -n 2 distconv run examples/lat_lon_forecast.py --grid w=2

Longitudes are split over ranks, and the last rank is the western neighbour of the first. Winds blow along parallels,
so the exact solution is known: each parallel turns at its own speed, and the tracer decays.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"w": MPI.COMM_WORLD.size})
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--longitudes", type=int, default=96)
options = parser.parse_args()

longitudes = 2 * math.pi * torch.arange(options.longitudes) / options.longitudes
latitudes = math.pi * ((torch.arange(options.longitudes // 2) + 0.5) / (options.longitudes // 2) - 0.5)
speed = 0.2 * torch.sin(3 * latitudes).view(-1, 1)  # radians per day, for each parallel


def tracer(count, day, seed):
    """Return ``count`` fields on a day: waves that move with the winds, each with its own phase and decay rate."""
    random = torch.Generator().manual_seed(seed)
    waves = torch.arange(1, 7).view(6, 1, 1)
    phases = 6.3 * torch.rand(count, 6, 1, 1, generator=random)
    heights = torch.randn(count, 6, 1, 1, generator=random) / waves.sqrt() * torch.exp(-0.02 * day * waves)
    return (heights * torch.cos(waves * (longitudes - speed * day) + phases) * latitudes.cos().view(-1, 1)).sum(1, True)


class Convolution(nn.Module):
    """A convolution with circular padding in longitude and replicated padding at the poles."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.inside = nn.Conv2d(inputs, outputs, 5)

    def forward(self, x):
        """Return a field with as many cells as ``x``."""
        x = F.pad(x, (2, 2, 0, 0), mode="circular")
        return self.inside(F.pad(x, (0, 0, 2, 2), mode="replicate"))


class Forecast(nn.Module):
    """A network that maps the tracer and the latitude to the tracer a day later."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Convolution(2, 24), nn.GELU(), Convolution(24, 24), nn.GELU(), Convolution(24, 1))

    def forward(self, x, latitude):
        """Return ``x`` plus the learned change."""
        return x + self.layers(torch.cat([x, latitude], 1))


device = dc.device()
grid = dc.ProcessGrid(MPI.COMM_WORLD, **options.grid)
torch.manual_seed(0)
model = dc.parallelize(Forecast().to(device), grid)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.steps)
where = latitudes.view(1, 1, -1, 1).expand(4, 1, -1, options.longitudes)
latitude = dc.scatter(where.contiguous().to(device), grid)

losses = []
for step in range(options.steps):
    day = torch.randint(20, (1,)).item()
    today, tomorrow = (dc.scatter(tracer(4, day + ahead, step).to(device), grid) for ahead in (0, 1))
    loss = F.mse_loss(model(today, latitude), tomorrow)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())

with torch.no_grad():
    state = dc.scatter(tracer(4, 0, seed=-1).to(device), grid)
    for _ in range(5):
        state = model(state, latitude)
    forecast = dc.gather(state).cpu()
first, truth = (tracer(4, day, seed=-1) for day in (0, 5))
error, unmoved = (((field - truth).square().mean() / truth.square().mean()).sqrt() for field in (forecast, first))
if grid.rank == 0:
    print(f"mean square error of a day {losses[0]:.5f} at first, {losses[-1]:.5f} at last")
    print(f"forecast of five days: relative error {error:.3f} (if nothing moved: {unmoved:.3f})")
