"""Recorded steps of a model's forward, and errors for models that a list of steps cannot repeat."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from distconv.pipeline.splitting.graph_cuts import SplitError
from distconv.pipeline.splitting.recording import FakeModel, ModelInput, containers
from distconv.pipeline.splitting.split import split
from tests.pipeline.splitting.modules import linears, model_of


def by_value(self, x):
    x = self.a(x)
    return self.b(x) if x.sum() > 0 else x


def by_chance(self, x):
    return self.b(self.a(x) * random.random()) * len(x.shape)


def kept(self, x):
    last = getattr(self, "last", x)
    self.last = self.a(x)
    return self.b(self.last + last) * len(x.shape)


def replaced(self, x):
    self.count = self.count + 1
    return self.b(self.a(x)) * len(x.shape)


def autocast(self, x):
    x = self.a(x * len(x.shape))
    with torch.autocast("cpu", torch.bfloat16):
        x = self.b(x)
    return x


def counted(self, x):
    x = self.a(x)
    return self.b(x[x > 0][:3]) * len(x.shape)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (by_value, r"its run with the example cannot follow test_recording.py:\d+: return .* if x.sum\(\) > 0 else x"),
        (counted, r"cannot follow test_recording.py:\d+: return self.b\(x\[x > 0\]"),
        (
            by_chance,
            "forward does not run the same operations each time, from 'mul.*' on; draw random numbers with torch",
        ),
        (kept, "it uses a tensor from an earlier call"),
        (replaced, r"it replaces a buffer; write into it, with copy_\(\) or add_\(\)"),
        (autocast, "it switches autocast on or off"),
    ],
)
def test_what_stages_would_not_repeat_is_refused(forward, message):
    model = model_of(forward, count=torch.zeros(()), **linears("a", "b"))
    with pytest.raises(SplitError, match=message):
        split(model, ["b"], torch.zeros(2, 3))
    assert not model.count.any() and not hasattr(model, "last")


def test_a_hook_of_a_container_is_refused_and_that_of_a_layer_is_called_by_the_stage():
    inner = nn.Sequential(*linears("c").values())
    model = model_of(lambda self, x: self.b(self.inner(self.a(x)) * len(x.shape)), inner=inner, **linears("a", "b"))
    seen = []
    model.b.register_forward_hook(lambda module, inputs, output: seen.append(output))
    first, second = split(model, ["b"], torch.zeros(2, 3))
    seen.clear()  # it was called with fake tensors while forward was recorded
    found = second(first(torch.ones(2, 3)))
    assert len(seen) == 1 and seen[0] is found
    inner.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(SplitError, match="it has hooks"):
        split(model, ["b"], torch.zeros(2, 3))


def test_a_model_that_cannot_be_copied_is_refused():
    model = model_of(lambda self, x: self.b(self.a(x)) * len(x.shape), **linears("a", "b"))
    model.rows = (row for row in range(3))
    with pytest.raises(SplitError, match="cannot be copied for a trial run: cannot pickle 'generator' object"):
        split(model, ["b"], torch.zeros(2, 3))


def test_calls_and_steps_are_those_of_the_forward_pass():
    model = nn.Sequential(nn.Linear(3, 3), model_of(lambda self, x: self.a(x).view(x.shape[0], -1) + 1, **linears("a")))
    like, _ = ModelInput.from_arguments((torch.ones(5, 3),), {})
    recording = FakeModel(model).record(like, [True] * len(containers(model)))
    assert [(call.name, call.layer) for call in recording.calls] == [
        ("", False),
        ("0", True),
        ("1", False),
        ("1.a", True),
    ]
    steps = [(node.op, node.name, node.args[1:]) for node in recording.graph.nodes if node.op.startswith("call")]
    assert steps == [
        ("call_module", "_0", ()),
        ("call_module", "_1_a", ()),
        ("call_function", "view", (5, -1)),
        ("call_function", "add", (1,)),
    ]


def test_containers_are_what_stages_do_not_call():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU()), nn.ModuleList([nn.BatchNorm1d(3)]))
    assert containers(model) == [model, model[1]]
