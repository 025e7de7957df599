"""Stages whose layers have grids of their own, as a plan says: one process's numbers, and the serial pipeline's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.errors import PlanError
from distconv.layers.models import MODELS
from distconv.pipeline import Pipeline, ScheduleError, split
from tests.pipeline.runtime.test_grids import (
    assert_as_one_process,
    classification,
    images,
    segmentation,
)

CONV1_BY_SAMPLES = dc.Plan({"*": {"h": 2}, "0": {"n": 2}})
CHANNELS_FIRST = dc.Plan({"*": {"w": 2}, "0": {"c": 2}})
CHANNELS_LAST = dc.Plan({"1": {"h": 2}, "3": {"c": 2}})
FOUR_PARTS = dc.Plan({"0": {"h": 2, "w": 2}, "3": {"n": 2}}, 4)
LINEAR_BY_CHANNELS = dc.Plan({"0": {"n": 2}, "4": {"c": 2}, "6": {"n": 2}})

PLANS = {
    2: [[CONV1_BY_SAMPLES], [CHANNELS_FIRST]],
    3: [[CONV1_BY_SAMPLES, None], [None, CHANNELS_LAST]],
    4: [[CONV1_BY_SAMPLES, CHANNELS_LAST], [CHANNELS_FIRST, {"h": 2}], [None, CHANNELS_LAST, None]],
    6: [[FOUR_PARTS, CHANNELS_LAST], [CHANNELS_FIRST, {"h": 2}, CHANNELS_LAST]],
}
"""First layers of the stages of ``segmentation``: a convolution is layer 0 or 1, another one layer 3."""


@pytest.mark.long
@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.parametrize("schedule", ["1f1b-so", "zero-bubble"])
def test_layers_of_a_stage_on_grids_of_their_own(comm, schedule):
    for plans in PLANS[comm.size]:
        assert_as_one_process(comm, one_conv_between, images(3), schedule, 2, plans)


SHARDED = dc.Plan({"*": {"h": 2}}, shard_weights=True)
SHARDED_LAYERS = dc.Plan({"*": {"n": 2}, "3": {"c": 2}}, shard_weights={"0": "n", "3": True})


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-so", "zero-bubble"])
def test_stages_with_sharded_weights(comm, schedule):
    for plans in {3: [[SHARDED, None]], 4: [[SHARDED, SHARDED], [SHARDED_LAYERS, SHARDED]]}[comm.size]:
        assert_as_one_process(comm, segmentation, images(3), schedule, 2, plans)


@pytest.mark.ranks(4)
def test_replicas_of_a_stage_with_sharded_weights(comm):
    assert_as_one_process(comm, segmentation, images(3), "1f1b-so", 2, [SHARDED], replicas=(2,))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("schedule", "weights"), [("stale", "newest"), ("pipedream", "stash"), ("stale", "recompute")])
def test_asynchronous_schedules_refuse_sharded_weights(comm, schedule, weights):
    with pytest.raises(ScheduleError, match=f"{schedule} updates weights between the forward and the backward pass"):
        Pipeline(segmentation(2), comm, schedule, F.cross_entropy, weights=weights, plans=[SHARDED, {"h": 2}])


def one_conv_between(count):
    """Stages of which each has a layer 0 or 1, and a layer 3 that decides, with numbers of a middle one too."""
    stages = segmentation(count)
    for stage in stages[1:-1]:
        stage.append(nn.Conv2d(4, 4, 3, padding=1).double())
    return stages


@pytest.mark.ranks(3, 4)
def test_classes_of_linear_layers_with_grids_of_their_own(comm):
    data = [(x, y[:, 0, 0]) for x, y in images(3)]
    plans = {3: [None, LINEAR_BY_CHANNELS], 4: [CONV1_BY_SAMPLES, LINEAR_BY_CHANNELS]}[comm.size]
    assert_as_one_process(comm, classification, data, "gpipe", 2, plans)


@pytest.mark.ranks(4)
def test_the_names_in_a_plan_are_those_of_the_unsplit_model(comm):
    """A residual network cut inside: patterns for the whole model, in the stage that has the layers."""
    torch.manual_seed(0)
    kwargs = {"in_channels": 2, "classes": 3, "width": 4}
    alone, model = MODELS["resnet20"].factory(**kwargs).double(), MODELS["resnet20"].factory(**kwargs).double()
    model.load_state_dict(alone.state_dict())
    first = dc.Plan({"*": {"h": 2}, "conv1": {"n": 2}, "layer1.2.conv?": {"c": 2}})
    plans = [first, dc.Plan({"layer3.*": {"w": 2}, "fc": {"n": 2}})]
    data = [(x, y[:, 0, 0]) for x, y in images(2, [(4, 8, 8)])]
    stages = split(model, ["layer2.0.conv1"])
    pipe = Pipeline(stages, comm, "1f1b-sno", F.cross_entropy, 1, optimizer=optimizer, plans=plans)
    expected = optimizer(list(alone.parameters()))
    for x, target in data:
        loss = pipe.step(x, target)
        expected.zero_grad()
        value = F.cross_entropy(alone(x), target)
        value.backward()
        expected.step()
        assert loss == pytest.approx(value.item(), rel=1e-10)
    pipe.synchronize()
    pipe.close()
    found = {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.mark.ranks(2)
def test_a_plan_that_does_not_fit_its_stage_is_refused_on_all_ranks(comm):
    stages = segmentation(2)
    with pytest.raises(PlanError, match="stage 1: plan: 'fc' matches no layer of Sequential"):
        Pipeline(stages, comm, "gpipe", F.cross_entropy, plans=[None, dc.Plan({"fc": {"h": 1}})])
