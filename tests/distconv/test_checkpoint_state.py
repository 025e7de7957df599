"""A module, its optimizer and the random numbers come back as they were, or all differences are listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distconv import checkpoint, checkpoint_state
from tests.distconv.test_checkpoint import refused

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
    folder = checkpoint.save(shared_tmp_path, 5, *checkpoint_state.capture(model, optimizer, comm), comm)
    uninterrupted = steps(model, optimizer, 20)
    other = network()
    other_optimizer = optimizer_of(name, other)
    torch.manual_seed(99)
    checkpoint_state.restore(checkpoint.load(folder, comm), other, other_optimizer, comm)
    assert steps(other, other_optimizer, 20) == uninterrupted
    for (key, expected), found in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(found, expected), key


@pytest.mark.fault(64, 68)
def test_all_differences_from_the_model_are_listed(comm: Any, shared_tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of("sgd", model)
    folder = checkpoint.save(shared_tmp_path, 5, *checkpoint_state.capture(model, optimizer, comm), comm)
    other = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 2, 3), nn.PReLU())
    found = checkpoint.load(folder, comm)
    text = refused(comm, lambda: checkpoint_state.restore(found, other, optimizer_of("sgd", other), comm))
    for part in (
        "'4.weight' is missing",
        "'3.weight' is torch.float64 (1, 4, 3, 3), not torch.float32 (2, 4, 3, 3)",
        "'3.bias' is torch.float64 (1,), not torch.float32 (2,)",
        "'1.running_mean' is torch.float64 (4,), not torch.float32 (4,)",
    ):
        assert part in text
    text = refused(comm, lambda: checkpoint_state.restore(found, network(), optimizer_of("adam", network()), comm))
    assert "is of SGD, not of Adam" in text
