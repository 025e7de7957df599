"""Memory of a step against sums by hand, byte by byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.tracing import trace
from tests.perfmodel.networks import machine

WEIGHTS = 4 * 8 * 4 * 3 * 3
X, Y = 4 * 4 * 4 * 8 * 8, 4 * 4 * 8 * 8 * 8
"""Bytes of the convolution's weights, of its input and of its output, float32, for four samples."""


@pytest.fixture
def graph():
    return trace(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.ReLU()), (4, 4, 8, 8))


def memory(graph, parts, ranks=2, **assumptions):
    return evaluate(graph, {"*": parts}, machine(), ranks, **assumptions).memory


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_keep_all_holds_every_output_with_its_error_signal_and_the_input(graph, slots):
    state = (2 + slots) * WEIGHTS
    found = memory(graph, {"n": 2}, memory_model="keep-all", optimizer_slots=slots, workspace=1000.0)
    assert found == state + X / 2 + 2 * (Y / 2) + 2 * (Y / 2) + 1000


def test_keep_all_holds_halos_twice(graph):
    # Two rows (the kernel's reach) of eight columns for four samples of four channels.
    halo = 4 * 4 * 4 * 2 * 8
    spatial, sample = (memory(graph, parts, memory_model="keep-all") for parts in ({"h": 2}, {"n": 2}))
    assert spatial - sample == 2 * halo


def test_autograd_holds_what_is_saved_and_what_the_fullest_operation_works_on(graph):
    # ReLU is the fullest: the convolution's input and ReLU's result are saved, its own input and output at work.
    assert memory(graph, {"n": 2}) == 3 * WEIGHTS + X / 2 + Y / 2 + 2 * (Y / 2)


def test_a_result_that_waits_for_a_shortcut_is_held_until_there():
    class Shortcut(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.conv, self.last = nn.Conv2d(4, 8, 3, padding=1, bias=False), last

        def forward(self, x):
            y = self.conv(x)
            # The fullest operation is tanh, which knows nothing of y.
            return torch.tanh(torch.cat([y, y, y], 1))[:, :8] + (y if self.last else 0)

    waiting, not_waiting = (trace(Shortcut(last), (4, 4, 8, 8)) for last in (True, False))
    assert memory(waiting, {"n": 2}) - memory(not_waiting, {"n": 2}) == Y / 2


def test_autograd_holds_both_copies_that_a_redistribution_needs():
    # The fullest moment is the way of y to the other grid: packed and put in place, beside x and y, which are saved.
    layers = nn.Conv2d(4, 8, 1, bias=False), nn.Conv2d(8, 1, 1, bias=False)
    weights = 4 * (4 * 8 + 8 * 1)
    found = evaluate(trace(nn.Sequential(*layers), (4, 4, 8, 8)), {"0": {"n": 2}, "1": {"h": 2}}, machine(), 2).memory
    assert found == 3 * weights + X / 2 + Y / 2 + 2 * (Y / 2)
