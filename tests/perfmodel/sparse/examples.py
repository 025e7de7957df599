"""Networks and clouds whose operations are counted, and a machine."""

from __future__ import annotations

import torch
from torch import nn

from distconv.layers.models.sparse import sparse_resnet
from distconv.layers.sparse import SparseConv, SparseGlobalPool, SparseMaxPool, SparseTensor
from distconv.perfmodel.machine.links import Link
from distconv.perfmodel.machine.machine import Compute, Machine, Overlap, Roofline
from tests.layers.sparse.clouds import normal, random_coords, rng_of


def cloud(sites: int = 300, reach: int = 6, channels: int = 2, seed: int = 5) -> SparseTensor:
    """Sites of three samples in three dimensions."""
    coords = random_coords(rng_of(seed), 3, samples=(0, 1, 2), sites=sites, reach=reach)
    return SparseTensor(coords, normal(len(coords), channels), batch_size=3)


def network() -> nn.Module:
    """Some of each kind of layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        SparseConv(2, 4, 3),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        SparseConv(4, 6, 3),
        SparseMaxPool(2, stride=2),
        nn.Linear(6, 5),
        SparseConv(5, 3, 2, stride=2, transposed=True),
        SparseGlobalPool(),
        nn.Linear(3, 7),
    ).double()


def resnet() -> nn.Module:
    """A whole network with shortcuts."""
    torch.manual_seed(0)
    return sparse_resnet(width=2, in_channels=2, classes=3).double()


def machine(latency: float = 0.0, flops: float = 1e30) -> Machine:
    """One that takes time for latency and FLOPs alone."""
    link = Link(latency, 1e30)
    roofline = Roofline(flops_per_s=flops, bytes_per_s=1e30, kernel_s=0.0)
    return Machine("test", 4, 1e9, link, link, Overlap(halo=False, allreduce=False), (Compute(1, roofline),))
