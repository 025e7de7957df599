"""A recording as a program: what it computes, what it leaves out, and how long memory lives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv import recording
from distconv.capture.buffer_plan import below_autograd
from distconv.capture.replay_code import ReplayCode
from distconv.capture.run import record_run
from tests.distconv.layouts import grid_over, raises_everywhere


def generate(function, *args):
    run = record_run(function, args)
    return ReplayCode(run.recording, run.outputs(), run.gradient_slots(), len(run.before.values))


def test_views_of_what_is_held_and_unused_results_are_left_out_and_current_values_are_read():
    weight = torch.arange(6.0)

    def step(x):
        x.exp()
        torch.empty(5)
        return x.detach() @ weight.view(2, 3).t()

    made = generate(step, torch.ones(1, 3))
    assert made.source.count("\n    v") == 1  # the product
    weight.mul_(2)
    assert made.replay([torch.ones(1, 3)], [])[0].tolist() == [[6, 24]]


def test_changes_in_place_are_kept():
    total = torch.zeros(2)

    def step(x):
        total[0] += x[1]
        y = x.clone()
        y[0] = 5
        return y

    made = generate(step, torch.tensor([1.0, 2.0]))
    for count in (1, 2):
        assert made.replay([torch.tensor([1.0, 2.0])], [])[0].tolist() == [5, 2]
        assert total.tolist() == [2 * count, 0]


def test_several_results_lists_and_missing_ones():
    def step(x):
        first, second, *_ = x.split(2)
        values, places = second.max(0)
        order = torch.searchsorted(x, first, sorter=x.argsort())
        return torch.cat([first, values[None], places[None].float(), order.float()])

    made = generate(step, torch.zeros(6))
    assert made.replay([torch.tensor([1.0, 2, 3, 4, 5, 6])], [])[0].tolist() == [1, 2, 4, 1, 0, 1]


def test_a_failure_of_some_ranks_is_one_of_all(comm):
    grid = grid_over(comm, n=comm.size)
    target = dc.scatter(torch.full((comm.size, 2), 0.5, dtype=torch.float64), grid)
    values = torch.rand(comm.size, 2, generator=torch.Generator().manual_seed(2)).double()
    taken = dc.capture(lambda x, t: F.binary_cross_entropy(x.abs(), t), dc.scatter(values / 2, grid), target)
    right = dc.scatter(values, grid)
    assert torch.equal(taken(right, target).local, F.binary_cross_entropy(right, target).local)
    values[-1, 0] = 7
    raises_everywhere(
        comm, RuntimeError, "between 0 and 1", lambda: taken(dc.scatter(values, grid), target), same_text=False
    )
    assert torch.equal(taken(right, target).local, F.binary_cross_entropy(right, target).local)


@pytest.mark.ranks(2)
def test_what_is_tried_on_all_ranks_may_have_no_effect_on_tensors(comm):
    def step(x):
        recording.active.try_on_all_ranks(comm, lambda: None)
        return x + 1

    assert generate(step, torch.ones(2)).replay([torch.zeros(2)], [])[0].tolist() == [1, 1]


def test_memory_goes_behind_its_last_use():
    """As eagerly: not all activations of a step without a backward pass are there at once."""
    layers = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1, bias=False) for _ in range(12)))

    @torch.no_grad()
    def step(x):
        return layers(x)

    assert generate(step, torch.ones(1, 1, 64, 64)).source.count("\n    del ") == 11


def test_below_autograd_nothing_is_recorded_or_cast():
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), below_autograd():
        y = torch.ops.aten.mm.default(x, x)
    assert y.dtype is torch.float32
    assert not y.requires_grad


def test_an_lstm_of_onednn_keeps_what_its_backward_pass_reads():
    """oneDNN's layer returns its workspace only while gradients are enabled, and replays run without them."""
    torch.manual_seed(0)
    layer = nn.LSTM(5, 7)
    example, other = torch.randn(2, 4, 3, 5)

    def step(x):
        output, _ = layer(x)
        return [output.detach(), *torch.autograd.grad((output**2).sum(), list(layer.parameters()))]

    made = generate(step, example)
    for found, expected in zip(made.replay([other], [None] * 4)[:5], step(other), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
