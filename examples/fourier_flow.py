"""Advance a two-dimensional turbulent flow with a Fourier neural operator; the rows are split over ranks.

    mpiexec -n 2 distconv run examples/fourier_flow.py --grid h=2

The flow is periodic and incompressible: vorticity w, dw/dt + u . grad w = nu laplace w, pseudo-spectral.
"""

import argparse

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"h": MPI.COMM_WORLD.size})
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--flows", type=int, default=96)
options = parser.parse_args()


def advance(vorticity, time, dt=0.005, nu=2e-3):
    """Return the vorticity (samples, 1, size, size) after ``time``: midpoint rule, dealiased by the two-thirds rule."""
    size = vorticity.shape[-1]
    k = torch.fft.fftfreq(size, 1 / size).view(-1, 1)
    l = torch.fft.rfftfreq(size, 1 / size).view(1, -1)  # noqa: E741
    square = k**2 + l**2
    kept = (k.abs() < size / 3) & (l < size / 3)

    def rate(w):
        stream = w / square.clamp(min=1)
        u, v, w_x, w_y = (torch.fft.irfft2(1j * part) for part in (k * stream, -l * stream, l * w, k * w))
        return -torch.fft.rfft2(u * w_x + v * w_y) * kept - nu * square * w

    w = torch.fft.rfft2(vorticity)
    for _ in range(round(time / dt)):
        w = w + dt * rate(w + dt / 2 * rate(w))
    return torch.fft.irfft2(w)


class FourierLayer(nn.Module):
    """The lowest ``modes`` frequencies times weights, plus a 1 x 1 convolution."""

    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, channels, channels, modes, modes, 2) / channels)
        self.local = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        """Return the layer's output; frequencies above the lowest become 0."""
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        low, high = (
            torch.einsum("nchw,cdhw->ndhw", part, torch.view_as_complex(weight))
            for part, weight in zip((spectrum[:, :, :m, :m], spectrum[:, :, -m:, :m]), self.weight, strict=True)
        )
        height, width = x.shape[-2] - 2 * m, x.shape[-1] // 2 + 1 - m
        rows = torch.cat([F.pad(low, (0, 0, 0, height)), high], dim=2)
        return F.gelu(torch.fft.irfft2(F.pad(rows, (0, width))) + self.local(x))


torch.manual_seed(0)
smooth = F.interpolate(torch.randn(options.flows, 1, 8, 8), size=options.size, mode="bicubic")
states = [advance(3 * (smooth - smooth.mean((2, 3), keepdim=True)), 0.5)]
for _ in range(4):
    states.append(advance(states[-1], 0.25))
# Four pairs of each flow, flow by flow, so that held-out pairs come from other flows.
start, later = (torch.stack(part, 1).flatten(0, 1) for part in (states[:-1], states[1:]))
held_out = len(start) // 4

device = dc.device()
grid = dc.ProcessGrid(MPI.COMM_WORLD, **options.grid)
model = nn.Sequential(nn.Conv2d(1, 16, 1), *[FourierLayer(16, 12) for _ in range(3)], nn.Conv2d(16, 1, 1))
model = dc.parallelize(model.to(device), grid)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=options.steps)


def error(predicted, wanted):
    """Return the error of the field relative to its norm."""
    return ((predicted - wanted).square().mean() / wanted.square().mean()).sqrt()


losses = []
for _ in range(options.steps):
    batch = held_out + torch.randint(len(start) - held_out, (8,))
    x, wanted = dc.scatter(start[batch].to(device), grid), dc.scatter(later[batch].to(device), grid)
    loss = error(x + model(x), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())

with torch.no_grad():
    x = dc.scatter(start[:held_out].to(device), grid)
    wanted = later[:held_out]
    predicted = dc.gather(x + model(x)).cpu()
if grid.rank == 0:
    print(f"relative error in training {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    print(f"held-out flows {error(predicted, wanted):.3f} (if nothing moved: {error(start[:held_out], wanted):.3f})")
