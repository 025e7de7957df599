"""A recorded run: what it leaves, and what it restores."""

from __future__ import annotations

import torch
from torch import nn

from distconv.capture.operations import OperatorCall
from distconv.capture.run import record_run


def test_results_gradients_and_memory_are_slots():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    model.weight.grad = torch.ones(2, 3)
    before = model.weight.grad

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return {"loss": loss, "input": x}

    found = record_run(step, [x])
    leaves = found.leaves([x])
    assert len(found.results) == 2
    assert [leaves[number] is model.bias for number, _ in found.gradients] == [True]  # the weight's is added to
    assert [leaves[n] is model.weight for n in found.gradient_slots().values()] == [True]
    assert any(t is model.bias for t in found.existing_tensors())
    assert found.modules == [model]
    assert model.weight.grad is before
    assert torch.equal(before, torch.ones(2, 3))
    assert model.bias.grad is None


def test_leaves_that_are_arguments_are_taken_from_those_of_the_call():
    weight, x, y = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    found = record_run(lambda x: (weight * x).sum().backward(), [x])
    assert {id(leaf) for leaf in found.leaves([y])} == {id(weight), id(y)}


def test_memory_that_is_written_to_is_restored():
    total, x = torch.zeros(3), torch.ones(3)

    def step(x):
        total.add_(x)
        x.mul_(2)
        return total * 1

    found = record_run(step, [x])
    assert total.tolist() == [0, 0, 0]
    assert x.tolist() == [1, 1, 1]
    assert not found.recording.unsupported


def test_members_that_the_step_makes_are_refused():
    class Lazy(nn.Module):
        def forward(self, x):
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones(2))
            return (x * self.scale).detach()

    model = Lazy()
    (refusal,) = record_run(lambda x: model(x), [torch.ones(2)]).recording.unsupported
    assert refusal.startswith("the step: Lazy has other parameters, buffers, submodules or hooks after the step")
    assert not record_run(lambda x: model(x), [torch.ones(2)]).recording.unsupported


def test_casts_are_made_anew_in_each_run():
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    with torch.autocast("cpu"):
        runs = [record_run(lambda x: model(x).sum().backward(), [x]) for _ in range(2)]
    first, second = ([e.function for e in run.recording.operations if isinstance(e, OperatorCall)] for run in runs)
    assert torch.ops.aten._to_copy.default in first and first == second
