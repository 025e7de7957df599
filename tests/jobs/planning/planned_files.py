"""A machine and networks for the tests of the commands that plan, and the folder they are in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from distconv.perfmodel.cost import operation_work

MACHINE = """\
name: tiny
ranks_per_node: 4
memory: 1 GB
links:
  node: {latency: 1 ns, bandwidth: 100 GB/s}
  network: {latency: 1 ns, bandwidth: 100 GB/s}
overlap: {halo: true, allreduce: true}
compute:
- busy: 1
  roofline: {flops: 1 GFLOP/s, bandwidth: 1 GB/s, kernel: 1 ns}
"""
"""Its ranks compute so slowly that it is worth while to use all of them."""

NETS = """\
import torch
from distconv.perfmodel.cost.operation_work import Work, register_cost

register_cost("i0", lambda call: (Work(flops=1.0), Work(flops=1.0)))


def build(in_channels, num_classes=3):
    return torch.nn.Sequential(
        torch.nn.Conv2d(in_channels, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, stride=2, padding=1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, num_classes),
    )


class Bessel(torch.nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.conv = torch.nn.Conv2d(in_channels, 4, 3, padding=1)

    def forward(self, x):
        return torch.i0(self.conv(x))


class Unknown(Bessel):
    def forward(self, x):
        return torch.digamma(self.conv(x))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Custom(Bessel):
    def forward(self, x):
        return Double.apply(self.conv(x))


class Shy(Bessel):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def number():
    return 7


def needy(in_channels, num_classes, *more, **others):
    return build(in_channels, num_classes)


def greedy(in_channels, depth):
    return build(in_channels)
"""


@pytest.fixture(autouse=True)
def folder(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of all ranks, with a machine and networks. For every test of a module that imports it."""
    if comm.rank == 0:
        write(shared_tmp_path)
    comm.Barrier()
    monkeypatch.chdir(shared_tmp_path)
    monkeypatch.setattr(sys, "path", [str(shared_tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "planned_nets", raising=False)
    monkeypatch.setattr(operation_work, "_registered", dict(operation_work._registered))
    return shared_tmp_path


def write(folder: Path) -> None:
    """Put tiny.yaml and planned_nets.py there."""
    (folder / "tiny.yaml").write_text(MACHINE)
    (folder / "planned_nets.py").write_text(NETS)
