"""Sparse networks in pipelines: the bits of one process, or of the serial pipeline if the schedule is asynchronous."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distconv.layers.sparse import SparseConv, SparseGlobalPool, SparseMaxPool
from distconv.layers.sparse.stages import as_stages, packed
from tests.layers.sparse.clouds import random_cloud, rng_of
from tests.pipeline.training import assert_trains_as_one_process

SCHEDULES = [("1f1b-sno", 4), ("zero-bubble", 2), ("stale", 1)]


def mini_batches(channels, classes):
    """Clouds of four samples, one of which has no sites, with sites in other numbers each time."""
    found = []
    for number, sites in enumerate((40, 15, 60)):
        x = random_cloud(rng_of("batch", number), 3, channels, sites=sites)
        found.append((packed(x.detach()), torch.arange(4) % classes))
    return found


def parts(count):
    torch.manual_seed(5)
    made = [
        nn.Sequential(SparseConv(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU()),
        nn.Sequential(SparseConv(3, 4, 2, stride=2), nn.ReLU(), SparseConv(4, 4, 3, submanifold=False)),
        nn.Sequential(nn.BatchNorm1d(4), SparseMaxPool(2), SparseConv(4, 3, 3)),
        nn.Sequential(SparseGlobalPool("avg"), nn.Linear(3, 3)),
    ]
    while len(made) > count:
        made[-2:] = [nn.Sequential(*made[-2:])]
    return as_stages([part.double() for part in made])


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("schedule", "microbatches"), SCHEDULES)
def test_training_has_the_bits_of_one_process(comm, schedule, microbatches):
    assert_trains_as_one_process(comm, parts(comm.size), mini_batches(2, 3), schedule, microbatches)
