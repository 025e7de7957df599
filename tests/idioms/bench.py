"""A model with its optimizer and data, in one process or on a grid, for idioms to work with."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import normal

SAMPLES, ROWS, COLUMNS = 5, 7, 9

Found = dict[str, Any]
"""Results of an idiom by name: tensors, plain or distributed, and numbers."""


class Net(nn.Module):
    """A classifier that shrinks its images and lets them grow again, with extents that few numbers divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 7, 3, padding=1, bias=False), nn.BatchNorm2d(7)
        self.second = nn.Conv2d(7, 10, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(10, 6, 2, stride=2)
        self.hidden, self.head = nn.Linear(6, 7), nn.Linear(7, 5)

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.first(x)))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.up(F.relu(self.second(self.begin(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.hidden(self.features(x).mean((2, 3)))))


class Bench:
    """A model with its optimizer, plain (``grid`` None) or parallelized, and data placed accordingly."""

    def __init__(self, grid: dc.ProcessGrid | None) -> None:
        torch.manual_seed(3)
        self.grid = grid
        self.model = self.parallel(Net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)

    def parallel(self, module: Any) -> Any:
        """``module`` in float64, on the grid."""
        module.double()
        return module if self.grid is None else dc.parallelize(module, self.grid)

    def made(self, make: Any, seed: int = 5) -> Any:
        """The module that ``make`` returns, with the same weights everywhere, on the grid."""
        torch.manual_seed(seed)
        return self.parallel(make())

    def place(self, tensor: torch.Tensor, dims: Any = None) -> torch.Tensor:
        """``tensor`` on the grid."""
        return tensor if self.grid is None else dc.scatter(tensor, self.grid, dims=dims)

    def images(self, seed: int = 0, channels: int = 3) -> torch.Tensor:
        return self.place(normal(SAMPLES, channels, ROWS, COLUMNS, seed=seed))

    def labels(self) -> torch.Tensor:
        return self.place(torch.tensor([0, 3, 1, 4, 3]), "n")

    def masks(self, classes: int = 5) -> torch.Tensor:
        """A class for each pixel."""
        labels = (normal(SAMPLES, ROWS, COLUMNS, seed=40) * 2).long().abs() % classes
        return self.place(labels, "nhw")

    def loss(self, seed: int = 0, model: Any = None) -> torch.Tensor:
        return F.cross_entropy((model or self.model)(self.images(seed)), self.labels())

    def step(self, seed: int = 0) -> None:
        self.optimizer.zero_grad()
        self.loss(seed).backward()
        self.optimizer.step()

    def no_sync(self) -> Any:
        return contextlib.nullcontext() if self.grid is None else dc.no_sync()

    def gradients(self, module: Any = None) -> Found:
        """The gradients of all weights as they are now."""
        named = (module or self.model).named_parameters()
        return {f"dL/d{n}": kept(p.grad) for n, p in named if p.grad is not None}

    def state(self, module: Any = None, optimizer: bool = False) -> Found:
        """All weights and buffers as they are now, and what the optimizer keeps."""
        found = {name: kept(tensor) for name, tensor in (module or self.model).state_dict().items()}
        if optimizer:
            for number, entry in self.optimizer.state_dict()["state"].items():
                found |= {f"{k} of {number}": kept(v) for k, v in entry.items() if isinstance(v, torch.Tensor)}
        return found


def kept(value: Any) -> torch.Tensor:
    """The whole of ``value`` as it is now."""
    if isinstance(value, dc.DistTensor):
        return dc.gather(value.detach()).clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
