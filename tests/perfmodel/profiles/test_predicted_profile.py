"""Layer profiles of traced networks by a machine's roofline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from distconv.layers.models import MODELS
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.machine import Machine, Overlap
from distconv.perfmodel.profiles.predicted_profile import predicted_profile
from distconv.plan import Plan

LASSEN = Machine.load("lassen")


@pytest.mark.parametrize("name", ["lenet5", "resnet20", "unet"])
def test_the_layers_take_what_a_step_on_one_rank_is_predicted_to_compute(name):
    graph = trace(MODELS[name](width=4), (2, MODELS[name].sample[0], 32, 32))
    profile = predicted_profile(graph, LASSEN)
    layers = evaluate(graph, Plan({"*": {}}), LASSEN, 1).layers.values()
    computed = sum(layer.fp + layer.bpx + layer.bpw for layer in layers)
    assert sum(layer.time_s for layer in profile.layers) == pytest.approx(computed)


@pytest.mark.parametrize("layers", [{"*": {"n": 2}}, {"*": {"h": 2}}, {"*": {"h": 2}, "layer2*": {"n": 2}}], ids=str)
def test_the_layers_of_several_ranks_take_what_a_step_without_overlap_takes_before_its_update(layers):
    machine = replace(LASSEN, overlap=Overlap(halo=False, allreduce=False))
    graph = trace(MODELS["resnet20"](width=4), (2, 3, 32, 32))
    profile = predicted_profile(graph, machine, Plan(layers), 2)
    step = evaluate(graph, Plan(layers), machine, 2)
    updates = sum(layer.update for layer in step.layers.values())
    assert sum(layer.time_s for layer in profile.layers) + updates == pytest.approx(step.time, rel=1e-12)
    assert profile.layers[0].activation_bytes == predicted_profile(graph, machine).layers[0].activation_bytes / 2


def test_a_shortcut_is_an_edge_and_views_and_shared_weights_are_looked_through():
    class Shortcut(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(64, 2)

        def forward(self, x):
            x = self.conv(x)
            return self.fc(torch.flatten(x + self.conv(x), 1))

    profile = predicted_profile(trace(Shortcut(), (2, 4, 4, 4)), LASSEN)
    first, second, added, last = (layer.name for layer in profile.layers)
    assert (first, second, last) == ("conv", "conv#2", "fc")
    assert set(profile.edges) == {(first, second), (first, added), (second, added), (added, last)}
    assert [layer.parameter_bytes for layer in profile.layers] == [592, 0, 0, 520]
    assert [layer.activation_bytes for layer in profile.layers] == [512, 512, 512, 16]
