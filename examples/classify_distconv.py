"""Classify noisy gratings of eight directions with a network that distconv splits.

mpiexec -n 2 distconv run examples/classify_distconv.py --grid h=2
"""

import argparse
import math

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import distconv as dc

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--size", type=int, default=48)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--grid", type=dc.parse_grid, default={"n": MPI.COMM_WORLD.size})
options = parser.parse_args()

grid = dc.ProcessGrid(MPI.COMM_WORLD, **options.grid)

torch.manual_seed(0)
labels = torch.arange(options.samples) % 8
y, x = torch.meshgrid(torch.arange(options.size), torch.arange(options.size), indexing="ij")
angles = (labels * math.pi / 8).view(-1, 1, 1)
waves = torch.sin((x * angles.cos() + y * angles.sin()) / 2 + 6.3 * torch.rand(options.samples, 1, 1))
data = TensorDataset((waves + torch.randn(waves.shape)).unsqueeze(1), labels)
sampler = DistributedSampler(data, num_replicas=1, rank=0)
loader = DataLoader(data, options.batch, sampler=sampler)

layers = [nn.Conv2d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)]
layers += [nn.Conv2d(16, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8))
model = dc.parallelize(model, grid)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

losses = []
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        loss = F.cross_entropy(model(dc.scatter(images, grid)), dc.scatter(targets, grid))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.append(loss.item())
    if grid.rank == 0:
        print(f"epoch {epoch + 1} loss {losses[-1]:.6f}", flush=True)
