"""A finite-difference stencil with a rule: find the conductivities of a plate from the heat after some steps.

    mpiexec -n 2 distconv run examples/finite_differences.py --grid h=2

The stencil needs the neighbours of each point. distconv exchanges the halo rows of the blocks and their gradients.
"""

import argparse

import torch
from mpi4py import MPI
from torch import nn

import distconv as dc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"h": MPI.COMM_WORLD.size})
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--size", type=int, default=64)
options = parser.parse_args()

point, neighbours = dc.Window(), dc.Window(3, padding=1)


@dc.rule(u={0: point, 1: point, 2: neighbours, 3: neighbours})  # outside the plate u is 0
def spread(u, conductivity):
    """Return the heat that flows into each point from its four neighbours; ``u`` has one more point at each side."""
    inner = u[..., 1:-1, 1:-1]
    vertical = u[..., :-2, 1:-1] - 2 * inner + u[..., 2:, 1:-1]
    horizontal = u[..., 1:-1, :-2] - 2 * inner + u[..., 1:-1, 2:]
    return conductivity[0] * vertical + conductivity[1] * horizontal


class Plate(nn.Module):
    """A plate whose heat diffuses for eight time steps."""

    def __init__(self, *conductivity):
        super().__init__()
        self.conductivity = nn.Parameter(torch.tensor(conductivity))

    def forward(self, u):
        """Return the heat (N, 1, H, W) after the steps."""
        for _ in range(8):
            u = u + spread(u, self.conductivity)
        return u


grid = dc.ProcessGrid(**options.grid)
torch.manual_seed(0)
heat = torch.randn(2, 1, options.size, options.size)
with torch.no_grad():
    later = Plate(0.2, 0.05)(heat)  # what is measured
u, measured = dc.scatter(heat, grid), dc.scatter(later, grid)
model = dc.parallelize(Plate(0.1, 0.1), grid)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
losses = []
for _ in range(options.steps):
    optimizer.zero_grad()
    loss = (model(u) - measured).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if grid.rank == 0:
    print(f"loss {losses[0]:.2e} -> {losses[-1]:.2e}, conductivities {model.conductivity.tolist()}")
