"""A module, its optimizer and the random numbers come back as they were, or all differences are listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from distconv import checkpoint
from tests.distconv.checkpoint.damage import refused
from tests.distconv.layouts import grid_over, normal

pytestmark = pytest.mark.ranks(1, 2, 4)


def network(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, width, 3), nn.BatchNorm2d(width), nn.Dropout(0.5), nn.Conv2d(width, 1, 3)
    ).double()


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return torch.optim.Adam(model.parameters(), 0.01)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = (model(torch.randn(2, 2, 8, 8, dtype=torch.float64)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.fault(66)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_training_goes_on_as_if_nothing_had_happened(comm: Any, shared_tmp_path: Path, name: str) -> None:
    model = network()
    optimizer = optimizer_of(name, model)
    torch.manual_seed(7)
    steps(model, optimizer, 5)
    folder = checkpoint.save(shared_tmp_path, 5, *checkpoint.capture(model, optimizer, comm), comm)
    uninterrupted = steps(model, optimizer, 20)
    other = network()
    other_optimizer = optimizer_of(name, other)
    torch.manual_seed(99)
    checkpoint.restore(checkpoint.load(folder, comm), other, other_optimizer, comm)
    assert steps(other, other_optimizer, 20) == uninterrupted
    for (key, expected), found in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(found, expected), key


@pytest.mark.fault(64, 68)
def test_all_differences_from_the_model_are_listed(comm: Any, shared_tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of("sgd", model)
    folder = checkpoint.save(shared_tmp_path, 5, *checkpoint.capture(model, optimizer, comm), comm)
    other = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 2, 3), nn.PReLU())
    found = checkpoint.load(folder, comm)
    text = refused(comm, lambda: checkpoint.restore(found, other, optimizer_of("sgd", other), comm))
    for part in (
        "'4.weight' is missing",
        "'3.weight' is torch.float64 (1, 4, 3, 3), not torch.float32 (2, 4, 3, 3)",
        "'3.bias' is torch.float64 (1,), not torch.float32 (2,)",
        "'1.running_mean' is torch.float64 (4,), not torch.float32 (4,)",
    ):
        assert part in text
    text = refused(comm, lambda: checkpoint.restore(found, network(), optimizer_of("adam", network()), comm))
    assert "is of SGD, not of Adam" in text


def on_grid(grid: dc.ProcessGrid, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for number in range(count):
        x = dc.scatter(normal(4, 2, 8, 8, seed=number), grid)
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.fault(67)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("name", "before", "after"), [("adam", *"ch"), ("sgd", *"hc"), ("adam", *"cc"), ("sgd", *"nc")]
)
def test_a_users_own_loop_goes_on_on_another_grid(
    comm: Any, shared_tmp_path: Path, name: str, before: str, after: str
) -> None:
    grid = grid_over(comm, **{before: comm.size})
    model = dc.parallelize(network(8), grid)
    optimizer = optimizer_of(name, model)
    assert dc.load_checkpoint(shared_tmp_path, model, optimizer, comm=comm) is None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.manual_seed(7)
    on_grid(grid, model, optimizer, 2)
    dc.save_checkpoint(shared_tmp_path, 2, model, optimizer, {"schedule": schedule.state_dict()}, comm=comm)
    uninterrupted = on_grid(grid, model, optimizer, 5)
    other = grid_over(comm, **{after: comm.size})
    twin = dc.parallelize(network(8), other)
    for parameter in twin.parameters():
        parameter.data.zero_()
    twin_optimizer = optimizer_of(name, twin)
    found = dc.load_checkpoint(shared_tmp_path, twin, twin_optimizer, comm=comm)
    assert found == (2, {"schedule": schedule.state_dict()})
    again = on_grid(other, twin, twin_optimizer, 5)
    assert again == pytest.approx(uninterrupted, rel=1e-11)
    if before == after:
        assert again == uninterrupted
