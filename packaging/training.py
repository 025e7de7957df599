"""A tiny training over two ranks; prints the Python, torch and MPI it ran with, and a digest of the trained weights."""

from __future__ import annotations

import hashlib
import platform

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc

torch.set_num_threads(1)  # sums in one order
torch.manual_seed(0)
grid = dc.ProcessGrid(h=2)
net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3, padding=1))
model = dc.parallelize(net.double(), grid)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = dc.scatter(torch.randn(2, 3, 16, 16, dtype=torch.float64), grid)
t = dc.scatter(torch.randint(5, (2, 16, 16)), grid, dims="nhw")
for _ in range(5):
    loss = F.cross_entropy(model(x), t)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.blake2b(digest_size=8)
for weight in model.state_dict().values():
    digest.update(weight.numpy().tobytes())
last = float(loss)
if grid.rank == 0:
    library = " ".join(MPI.Get_library_version().replace(",", " ").split()[:3])
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {library}, {grid.size} ranks:", end=" ")
    print(f"loss {last:.15f}, digest {digest.hexdigest()}")
