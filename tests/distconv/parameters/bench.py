"""A model with its optimizer and data, on one process and on grids, through the same scenario."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.parameters.state_tensor import StateTensor
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import close


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.hidden, self.head = nn.Linear(6, 7), nn.Linear(7, 5)

    def begin(self, x):
        return F.relu(self.norm(self.first(x)))

    def forward(self, x):
        x = F.relu(self.up(F.relu(self.second(self.begin(x)))))
        return self.head(F.relu(self.hidden(x.mean((2, 3)))))


class Bench:
    """A model with its optimizer, plain (``grid`` None) or parallelized, and data placed accordingly."""

    def __init__(self, grid, shard_weights=False):
        torch.manual_seed(3)
        self.grid, self.model = grid, Net().double()
        self.optimizer = self.made(self.model)
        if grid is not None:
            dc.parallelize(self.model, grid, shard_weights=shard_weights)

    def made(self, model):
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)

    def batch(self, seed):
        x, label = normal(4, 3, 7, 9, seed=seed), torch.tensor([0, 3, 1, 4])
        if self.grid is None:
            return x, label
        return dc.scatter(x, self.grid), dc.scatter(label, self.grid, dims="n")

    def loss(self, seed, model=None):
        x, label = self.batch(seed)
        return F.cross_entropy((model or self.model)(x), label)

    def no_sync(self):
        return contextlib.nullcontext() if self.grid is None else dc.no_sync()


def sharded_grids(comm):
    size = comm.size
    return [grid_over(comm, c=size), *([grid_over(comm, c=2, h=size // 2)] if size % 2 == 0 else [])]


def weights_over_all_axes(comm):
    """Grids with the axes over which weights are sharded in addition."""
    if comm.size == 4:
        halves = grid_over(comm, n=2, h=2)
        return [(halves, True), (halves, "n"), (grid_over(comm, c=2, h=2), True)]
    return [(grid_over(comm, n=comm.size), True), (grid_over(comm, h=comm.size), "n,h")]


def as_in_one_process(comm, scenario):
    """Run ``scenario(bench)``, which returns tensors, plain and on grids with sharded weights; compare."""
    expected = scenario(Bench(None))
    over_channels = [(grid, False) for grid in [*sharded_grids(comm), grid_over(comm, n=comm.size)]]
    for grid, shard_weights in [*over_channels, *weights_over_all_axes(comm)]:
        found = scenario(Bench(grid, shard_weights))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert type(found[name]) in (torch.Tensor, StateTensor), name
            close(found[name], tensor, f"{name} on {grid}, weights sharded over {shard_weights}")


def whole_gradients(model):
    return {f"dL/d{n}": dc.gather(p.grad.detach()) for n, p in model.named_parameters()}
