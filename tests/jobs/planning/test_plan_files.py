"""The example plan that ships: ResNet-50 with spatial early layers and channel-parallel late layers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.layers.models import MODELS
from tests.distconv.layouts import normal

PLAN = Path(__file__).resolve().parents[3] / "jobs" / "plans" / "resnet50-4-ranks.json"


@pytest.mark.ranks(4)
def test_it_has_the_loss_and_gradients_of_one_process_and_shards_late_weights(comm):
    torch.manual_seed(0)
    expected = MODELS["resnet50"](width=4, classes=7).double()
    plan, model = dc.Plan.load(PLAN, comm), copy.deepcopy(expected)
    dc.parallelize(model, plan, comm=comm)
    grid = plan.input_grid(model, comm)
    assert grid.shape["h"] == grid.shape["w"] == 2
    late, early = model.get_parameter("layer4.2.conv2.weight"), model.get_parameter("layer1.0.conv2.weight")
    assert isinstance(late, dc.DistTensor) and late.local.numel() * 4 == late.numel()
    assert not isinstance(early, dc.DistTensor)
    x, label = normal(2, 3, 70, 65), torch.tensor([1, 5])
    losses = (
        F.cross_entropy(expected(x), label),
        F.cross_entropy(model(dc.scatter(x, grid)), dc.scatter(label, grid, dims="n")),
    )
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-10)
    for (name, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert (dc.gather(other.grad) - one.grad).abs().max() <= 1e-9 * one.grad.abs().max().clamp_min(1), name
