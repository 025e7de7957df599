"""Where two runs of a step did something else is told."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from distconv.capture.step.differences import difference
from distconv.capture.step.run import recorded
from distconv.capture.watch.references import References


def run(function, *args):
    return recorded(function, args, References(function))


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


def test_what_is_returned_is_the_same_each_time():
    count = itertools.count()
    for step in (lambda: {1}, object, lambda: [next(count)], lambda: nn.ReLU()):
        assert "the step returns an object of type" in difference(run(step), run(step))
    assert "the step does not return the same" in difference(run(lambda: [1]), run(lambda: (1,)))
    model = nn.ReLU()
    assert difference(run(lambda: [torch.ones(2), 3, model]), run(lambda: [torch.ones(2), 3, model])) == ""
