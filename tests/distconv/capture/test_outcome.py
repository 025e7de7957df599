"""Results of steps are compared bit for bit, and memory that a step may change is restored."""

from __future__ import annotations

import torch
from torch import nn

from distconv.capture.outcome import StepOutcome, StepSnapshot, written_tensors
from distconv.capture.run import record_run

STATISTICS, X = torch.zeros(3), torch.ones(3)


def record_layer():
    layer = nn.Linear(3, 3)

    def step(x):
        STATISTICS.add_(x)
        y = torch.dropout(layer(x), 0.5, True)
        y.sum().backward()
        return y

    return layer, step, record_run(step, [X])


def test_memory_is_what_was_there_and_is_written():
    _, step, run = record_layer()
    assert [t is STATISTICS for t in written_tensors(run, [X])] == [True]
    state, before = torch.get_rng_state(), StepSnapshot(run, [X])
    step(X)
    assert STATISTICS.tolist() != [0, 0, 0]
    before.restore()
    assert STATISTICS.tolist() == [0, 0, 0]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(leaf.grad is None for leaf in run.leaves([X]))


def test_outcomes_are_far_apart_beyond_half_of_the_digits_and_the_spread_of_two_runs():
    outcomes = []
    for values in ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0002], [1.0, 2.01], [1.0, 2.02], [1.0, 2.2]):
        outcome = StepOutcome.__new__(StepOutcome)
        outcome.values = [("x", torch.tensor(values)), ("none", None)]
        outcomes.append(outcome)
    one, same, near, far, spread, farther = outcomes
    assert near.first_significant_difference(one, same) == ""
    assert far.first_significant_difference(one, same) == "x"
    assert far.first_significant_difference(one, spread) == ""
    assert farther.first_significant_difference(one, spread) == "x"
    spread.values[0] = "x", None
    assert one.first_significant_difference(same, spread) == "x"


def test_outcomes_are_told_apart_by_a_bit():
    layer, step, run = record_layer()
    outcomes = []
    before = StepSnapshot(run, [X])
    for change in ("", "", "result", "gradient", "memory", "generator"):
        before.restore()
        y = step(X).detach()
        if change == "result":
            y.view(torch.int32)[0] ^= 1
        elif change == "gradient":
            layer.bias.grad.view(torch.int32)[1] ^= 1
        elif change == "memory":
            STATISTICS[2] = -0.0 if STATISTICS[2] == 0 else STATISTICS[2] * (1 + 2e-7)
        elif change == "generator":
            torch.rand(1)
        outcomes.append(StepOutcome(run, [X], y))
    before.restore()
    first, *others = outcomes
    found = [first.first_difference(other) for other in others]
    assert found[:2] == ["", "result 0"]
    assert found[2].startswith("the gradient of ")
    assert found[3].startswith("a buffer or parameter")
    assert found[4] == "the state of a random generator"


def test_strides_count_where_there_is_more_than_one_index():
    _, _, run = record_layer()
    plain, part, turned = (
        torch.ones(1, 2, 2),
        torch.ones(2, 2, 2)[:1].as_strided((1, 2, 2), (9, 2, 1)),
        torch.ones(1, 2, 2).mT,
    )
    first, second, third = (StepOutcome(run, [X], tensor) for tensor in (plain, part, turned))
    assert first.first_difference(second) == ""
    assert first.first_difference(third) == "result 0"
