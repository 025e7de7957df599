"""A run of a step: what it leaves, what it puts back, and where two runs differ."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from distconv.capture.entries import Kind
from distconv.capture.steps import difference, recorded
from distconv.capture.watch.references import References


def run(function, *args):
    return recorded(function, args, References(function))


def test_results_gradients_and_memory_are_slots():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    model.weight.grad = torch.ones(2, 3)
    before = model.weight.grad

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return {"loss": loss, "input": x}

    found = run(step, x)
    assert len(found.results) == 2
    assert [leaf is model.bias for leaf, _ in found.gradients] == [True]  # the weight's is added to where it is
    assert [found.leaves()[n] is model.weight for n in found.gradient_slots().values()] == [True]
    assert any(t is model.bias for t in found.held())
    assert model.weight.grad is before
    assert torch.equal(before, torch.ones(2, 3))
    assert model.bias.grad is None


def test_what_is_written_to_is_put_back():
    total, x = torch.zeros(3), torch.ones(3)

    def step(x):
        total.add_(x)
        x.mul_(2)
        return total * 1

    found = run(step, x)
    assert total.tolist() == [0, 0, 0]
    assert x.tolist() == [1, 1, 1]
    assert not found.recording.refusals


def test_runs_of_one_step_are_alike():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), torch.randn(4, 3)
    torch.manual_seed(0)

    def step(x):
        model(x).sum().backward()

    assert difference(run(step, x), run(step, x)) == ""


def test_gradients_that_autograd_takes_or_copies_are_alike():
    """It copies what somebody else refers to, and that may be so in one run and not in the next."""
    weight, held = torch.ones(3, requires_grad=True), []
    weight.register_hook(held.append)

    def step(x):
        (weight * x).sum().backward()

    with_copy = run(step, torch.ones(3))
    weight.register_hook(lambda gradient: held.clear())
    without = run(step, torch.ones(3))
    copies = [sum("copy_" in entry.text() for entry in each.recording.entries) for each in (with_copy, without)]
    assert copies == [1, 0]
    assert difference(with_copy, without) == ""
    assert difference(without, with_copy) == ""


def test_a_gradient_that_lies_in_a_larger_one_is_taken_or_copied_alike():
    """Autograd takes it, for the strides of dimensions of one index say nothing; a copy has those of the parameter."""
    weight, held = torch.ones(1, 1, 3, requires_grad=True), []

    class Part(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.sum()

        @staticmethod
        def backward(ctx, gradient):
            return (gradient * torch.ones(1, 2, 3))[:, :1]

    weight.register_hook(held.append)

    def step():
        Part.apply(weight).backward()

    with_copy = run(step)
    weight.register_hook(lambda gradient: held.clear())
    without = run(step)
    strides = [each.recording.slots[each.gradients[0][1]].geometry[1] for each in (with_copy, without)]
    assert strides == [(3, 3, 1), (6, 3, 1)]
    assert difference(with_copy, without) == ""


def test_other_calls_numbers_and_tensors_are_told():
    count = itertools.count()

    def numbers(x):
        return x * next(count)

    def constants(x):
        return x * torch.tensor(float(next(count)))

    x = torch.ones(3)
    assert "another call, or other numbers" in difference(run(numbers, x), run(numbers, x))
    assert "Python makes another number each time" in difference(run(constants, x), run(constants, x))


def test_what_is_put_somewhere_is_taken_away_again():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.known = {}, torch.ones(2)

        def forward(self, x):
            self.features["double"] = x * 2
            self.features["known"], self.size, self.given = self.known, tuple(x.shape), [x]
            return x + 1

    model = Keeping()
    found = run(lambda x: model(x), torch.ones(2))
    puts = {place.name: value for place, value in found.puts}
    assert list(puts) == ["Keeping.size", "Keeping.given", "Keeping.features['double']", "Keeping.features['known']"]
    assert puts["Keeping.size"] == (2,)
    assert puts["Keeping.features['known']"] is model.known
    slots = [value.slot for value in (puts["Keeping.given"][0], puts["Keeping.features['double']"])]
    assert [found.recording.slots[slot].kind for slot in slots] == [Kind.INPUT, Kind.MADE]
    assert [each.slot for each in found.results[1:]] == slots
    assert model.features == {}
    assert not hasattr(model, "size")
    assert difference(found, run(lambda x: model(x), torch.ones(2))) == ""


def test_what_is_put_somewhere_is_the_same_each_time():
    model, count = nn.ReLU(), itertools.count()
    model.register_forward_hook(lambda module, args, output: kept.update(kinds[next(count)](output)))
    kinds = [lambda y: {"a": y}, lambda y: {"b": y}, lambda y: {"b": 1}, lambda y: {"b": 2}, lambda y: {}]
    kept = {}
    runs = [run(lambda: model(torch.ones(2))) for _ in kinds]
    texts = [difference(before, now) for before, now in itertools.pairwise(runs)]
    assert texts[0] == "the step sets kept['a'], but not each time: take a step before dc.capture, or return it"
    assert (
        texts[1]
        == texts[2]
        == "the step sets kept['b'], to something else each time, which a replay does not: return it"
    )
    assert texts[3] == ""  # it may be there already
