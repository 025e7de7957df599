"""The example plan that ships: ResNet-50 with spatial early layers and channel-parallel late layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.layers.models import MODELS
from tests.distconv.layouts import normal

PLAN = Path(__file__).resolve().parents[3] / "jobs" / "plans" / "resnet50-4-ranks.json"
STEPS = 2


def build():
    torch.manual_seed(0)
    return MODELS["resnet50"](width=4, classes=7).double()


def trained(comm=None):
    """Losses and final state of some steps on one process, or on ``comm`` as the plan says."""
    model = build()
    grid = None
    if comm is not None:
        plan = dc.Plan.load(PLAN, comm)
        dc.parallelize(model, plan, comm=comm)
        grid = plan.input_grid(model, comm)
        assert grid.shape["h"] == grid.shape["w"] == 2
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, label = normal(2, 3, 70, 65, seed=step), torch.tensor([1, 5])
        if grid is not None:
            x, label = dc.scatter(x, grid), dc.scatter(label, grid, dims="n")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.ranks(4)
def test_it_trains_as_one_process_does(comm):
    losses, state = trained()
    found, other = trained(comm)
    assert found == pytest.approx(losses, rel=1e-10)
    for name, tensor in state.items():
        assert (other[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max().clamp_min(1), name


@pytest.mark.ranks(4)
def test_late_weights_are_sharded_and_early_ones_whole(comm):
    model = dc.parallelize(build(), dc.Plan.load(PLAN, comm), comm=comm)
    late, early = model.get_parameter("layer4.2.conv2.weight"), model.get_parameter("layer1.0.conv2.weight")
    assert isinstance(late, dc.DistTensor)
    assert late.local.numel() * 4 == late.numel()
    assert not isinstance(early, dc.DistTensor)


@pytest.mark.ranks(2)
def test_on_other_ranks_it_is_refused(comm):
    with pytest.raises(dc.PlanError, match="made for 4 ranks, but there are 2"):
        dc.parallelize(build(), dc.Plan.load(PLAN, comm), comm=comm)
