"""The graph: calls of a layer, and what a window looks at."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from distconv.perfmodel.graph.graph import INPUT, KernelWindow
from distconv.perfmodel.graph.tracing import trace


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x, y):
        return self.conv(self.conv(x)) + y


@pytest.mark.parametrize("transposed", [False, True])
def test_a_window_needs_every_input_that_touches_one_of_its_outputs(transposed):
    for kernel, stride, padding, dilation in itertools.product([1, 2, 3, 4], [1, 2, 3], [0, 1], [1, 2]):
        window = KernelWindow((kernel,), (stride,), (padding,), (dilation,), transposed)
        taps = [k * dilation - padding for k in range(kernel)]
        for start, stop in [(0, 1), (0, 5), (3, 4), (4, 9)]:
            if transposed:
                touching = [i for i in range(-20, 40) if any(start <= i * stride + tap < stop for tap in taps)]
            else:
                touching = [o * stride + tap for o in range(start, stop) for tap in taps]
            first, end = window.needed(0, (start, stop))
            assert all(first <= i < end for i in touching)
            # No more than inputs that only lie between those that touch.
            if touching and not (transposed and dilation > 1):
                assert (first, end) == (min(touching), max(touching) + 1)


def test_layers_of_values_and_calls_of_layers_are_looked_up():
    graph = trace(Shared(), [(2, 4, 8, 8), (2, 4, 8, 8)])
    first, second, added = graph.operations
    assert graph.deciding == ("conv",) and graph.by_layer == {"conv": (first, second)}
    assert (first.x.producer, second.x.producer, added.x.producer) == (INPUT, 0, 1)
    assert [graph.layer_of(value) for value in added.inputs] == ["conv", graph.input_layer]
    assert graph.batch == 2 and first.y.elements == 2 * 4 * 8 * 8
    assert [constant.name for constant in first.parameters] == ["conv.weight", "conv.bias"]
