"""Copies of parameters on several ranks: equal ones pass, and one flipped bit is found and its rank named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.parameters.replicas import check_tensors
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
    assert f"the first is '{name}': one on rank {others}, another one on rank 1. Change weights" in text
    grid.free()


@pytest.mark.ranks(2, 3, 4)
def test_tensors_that_some_ranks_lack_are_not_compared(comm):
    common, own = normal(3), {f"{number} of rank {comm.rank}": normal(2) for number in range(comm.rank)}
    check_tensors({"a": common, **own, "z": common}, comm, "the state")
    if comm.rank == 1:
        flipped(common)
    raises_everywhere(comm, dc.MismatchError, "'a'", lambda: check_tensors({"a": common, **own}, comm, "the state"))


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


def classifier(comm, **axes):
    """A convolution and a head behind global pooling, whose gradients no rank sums over spatial axes."""
    torch.manual_seed(0)
    grid = dc.ProcessGrid(comm, **axes)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    return dc.parallelize(nn.Sequential(*layers).double(), grid), grid


def train(model, grid, steps, before=lambda step: None):
    x, labels = dc.scatter(normal(4, 3, 7, 9), grid), dc.scatter(torch.arange(4), grid, dims="n")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("axis", ["h", "r"])
def test_training_finds_a_changed_weight_whose_gradient_no_reduction_sums(comm, axis):
    model, grid = classifier(comm, **{axis: comm.size})
    changed = []

    def change(step):
        if step == 3 and comm.rank == 1:
            flipped(model[3].weight)
        changed.append(step)

    text = raises_everywhere(comm, dc.MismatchError, "no longer the same", lambda: train(model, grid, 40, change))
    assert "'3.weight'" in text or axis == "r"
    assert max(changed) <= 13
    grid.free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("axis", ["n", "h"])
def test_training_finds_a_head_that_each_rank_has_replaced_with_another_seed(comm, axis):
    model, grid = classifier(comm, **{axis: comm.size})
    torch.manual_seed(comm.rank)
    model[3] = nn.Linear(4, 5).double()
    raises_everywhere(comm, dc.MismatchError, "the first is '3.weight'", lambda: train(model, grid, 3))
    grid.free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["3.weight", "exp_avg"])
def test_no_checkpoint_is_saved_of_copies_that_differ(comm, shared_tmp_path, name):
    model, grid = classifier(comm, h=comm.size)
    optimizer = torch.optim.Adam(model.parameters())
    model(dc.scatter(normal(4, 3, 7, 9), grid)).square().sum().backward()
    optimizer.step()
    if comm.rank == 1:
        weight = model[3].weight
        flipped(weight if name == "3.weight" else optimizer.state[weight]["exp_avg"])
    folder = shared_tmp_path / "run"
    raises_everywhere(
        comm, dc.MismatchError, "save_checkpoint: 1 of", lambda: dc.save_checkpoint(folder, 1, model, optimizer)
    )
    assert not folder.exists()
    grid.free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("axis", ["n", "h"])
def test_evaluation_finds_weights_that_one_rank_alone_has_loaded(comm, axis):
    model, grid = classifier(comm, **{axis: comm.size})
    x = dc.scatter(normal(4, 3, 7, 9), grid)
    if comm.rank == 0:
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    model.eval()
    with torch.no_grad():
        text = raises_everywhere(comm, dc.MismatchError, "evaluation: 4 of 4", lambda: model(x))
    assert "the first is '0.weight'" in text
    grid.free()


@pytest.mark.ranks(2, 3)
def test_training_finds_a_buffer_that_one_rank_has_changed(comm):
    torch.manual_seed(0)
    grid = dc.ProcessGrid(comm, n=comm.size)
    model = dc.parallelize(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(252, 5)).double(), grid
    )

    def change(step):
        if step == 3 and comm.rank == 1:
            model[1].running_mean.add_(1.0)

    raises_everywhere(comm, dc.MismatchError, "1.running_mean", lambda: train(model, grid, 20, change))
    grid.free()
