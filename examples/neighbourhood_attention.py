"""Neighbourhood attention with a rule: each pixel attends to the 5 x 5 pixels around it.

    mpiexec -n 2 distconv run examples/neighbourhood_attention.py --grid h=2

A pixel needs its own query, and the keys and values around it. ``inside`` is 1 in the image and 0 in the padding.
"""

import argparse

import torch
from mpi4py import MPI
from torch import nn

import distconv as dc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"h": MPI.COMM_WORLD.size})
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--size", type=int, default=32)
options = parser.parse_args()

here = {0: dc.Window(), 2: dc.Window(), 3: dc.Window()}  # all channels (dimension 1) are needed
around = {0: dc.Window(), 2: dc.Window(5, padding=2), 3: dc.Window(5, padding=2)}


@dc.rule(q=here, k=around, v=around, inside=around)
def attention(q, k, v, inside):
    """Return attention (N, C, H, W) of q over neighbours inside the image; k and v have 2 more pixels at each side."""
    k, v, inside = (t.unfold(2, 5, 1).unfold(3, 5, 1) for t in (k, v, inside))
    scores = torch.einsum("nchw,nchwij->nhwij", q, k) / q.shape[1] ** 0.5
    weights = scores.masked_fill(inside[:, 0] == 0, -torch.inf).flatten(-2).softmax(-1)
    return torch.einsum("nhwk,nchwk->nchw", weights, v.flatten(-2))


class Attention(nn.Module):
    """A network that averages pixels with similar neighbours."""

    def __init__(self, channels=3, width=8):
        super().__init__()
        self.q, self.k = (nn.Conv2d(channels, width, 1) for _ in range(2))
        self.v = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        """Return the result for images (N, C, H, W)."""
        return attention(self.q(x), self.k(x), self.v(x), torch.ones_like(x[:, :1]))


grid = dc.ProcessGrid(**options.grid)
torch.manual_seed(0)
clean = torch.rand(4, 3, options.size // 4, options.size // 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
x = dc.scatter(clean + 0.2 * torch.randn_like(clean), grid)
target = dc.scatter(clean, grid)
model = dc.parallelize(Attention(), grid)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
losses = []
for _ in range(options.steps):
    optimizer.zero_grad()
    loss = (model(x) - target).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if grid.rank == 0:
    print(f"squared error {losses[0]:.4f} -> {losses[-1]:.4f}; of the noisy image it is 0.04")
