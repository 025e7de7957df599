"""A run of a step: what it leaves, and what it puts back."""

from __future__ import annotations

import torch
from torch import nn

from distconv.capture.entries import Kind
from distconv.capture.step.differences import difference
from distconv.capture.step.run import recorded
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


def test_what_is_put_into_an_argument_is_refused():
    (refusal,) = run(lambda batch: batch.update(y=batch["x"] * 2), {"x": torch.ones(2)}).recording.refusals
    assert "the step puts something into an argument of it" in refusal.reason


def test_casts_are_made_anew_in_each_run():
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    with torch.autocast("cpu"):
        runs = [run(lambda x: model(x).sum().backward(), x) for _ in range(2)]
    assert difference(*runs) == ""
    assert "_to_copy" in "".join(entry.text() for entry in runs[1].recording.entries)
