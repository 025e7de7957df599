"""Copies of parameters on several ranks: equal ones pass, and one flipped bit is found and its rank named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distconv as dc
from tests.distconv.layouts import normal, raises_everywhere


def trained(comm, **axes):
    """A model that has taken a step over a grid, and the grid."""
    torch.manual_seed(0)
    grid = dc.ProcessGrid(comm, **axes)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).double()
    model = dc.parallelize(model, grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(dc.scatter(normal(4, 4, 9, 8), grid)).square().mean().backward()
    optimizer.step()
    return model, grid


def flipped(block: torch.Tensor) -> None:
    """One bit of ``block`` is another one."""
    block.detach().view(-1).view(torch.int64)[block.numel() // 2] ^= 1


@pytest.mark.parametrize("axes", ["n", "h", "c"])
def test_ranks_that_trained_together_have_the_same(comm, axes):
    model, grid = trained(comm, **{axes: comm.size})
    dc.check_replicas(model, comm)
    grid.free()


@pytest.mark.fault(42)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["0.weight", "1.running_mean"])
def test_a_bit_that_differs_on_one_rank_is_found_everywhere(comm, name):
    model, grid = trained(comm, h=comm.size)
    if comm.rank == 1:
        flipped(model.state_dict()[name])
    text = raises_everywhere(comm, dc.MismatchError, "no longer the same", lambda: dc.check_replicas(model, comm))
    others = ", ".join(str(rank) for rank in range(comm.size) if rank != 1)
    assert f"the first is '{name}': one on rank {others}, another one on rank 1; a rank has gone wrong" in text
    grid.free()


@pytest.mark.fault(42)
@pytest.mark.ranks(4, 6)
def test_blocks_of_sharded_weights_are_compared_where_there_are_several(comm):
    """With c=2 the ranks 1, 3, ... have the same block; rank 3's is another."""
    model, grid = trained(comm, n=comm.size // 2, c=2)
    dc.check_replicas(model, comm)
    weight = model[0].weight
    assert isinstance(weight, dc.DistTensor)
    if comm.rank == 3:
        flipped(weight.local)
    text = raises_everywhere(comm, dc.MismatchError, "'0.weight'", lambda: dc.check_replicas(model, comm))
    others = ", ".join(str(rank) for rank in range(1, comm.size, 2) if rank != 3)
    assert f"one on rank {others}, another one on rank 3" in text
    grid.free()
