"""Windows: as many outputs as torch's pooling gives, and the input that they need."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from distconv.distribution import Interval
from distconv.layers.rules.window import Window, nonnegative_dims, pad_argument


def test_outputs_are_as_many_as_those_of_torch() -> None:
    for extent, size, stride, padding, dilation in itertools.product((5, 12), (1, 2, 3), (1, 3), (0, 1), (1, 2)):
        window = Window(size, stride, padding, dilation)
        x, kernel = torch.zeros(1, 1, extent), torch.zeros(1, 1, size)
        y = F.conv1d(x, kernel, stride=stride, padding=padding, dilation=dilation)
        assert window.outputs(extent) == y.shape[-1]


def test_inputs_that_outputs_need_are_those_with_a_gradient() -> None:
    for size, stride, padding, dilation in itertools.product((1, 2, 3), (1, 3), (0, 2), (1, 2)):
        window = Window(size, stride, padding, dilation)
        x = torch.zeros(1, 1, 14, requires_grad=True)
        y = F.conv1d(x, torch.ones(1, 1, size), stride=stride, padding=padding, dilation=dilation)
        for a, b in ((0, 1), (1, 3), (y.shape[-1] - 1, y.shape[-1])):
            (grad,) = torch.autograd.grad(y[..., a:b].sum(), x, retain_graph=True)
            touched = grad[0, 0].nonzero().flatten().tolist()
            needed = window.needed(Interval(a, b))
            if touched:
                assert max(0, needed.start) <= touched[0] and touched[-1] < needed.stop
                assert needed.start + padding >= 0
    assert Window(3, padding=1).needed(Interval(4, 4)) == Interval(0, 0)


def test_dimensions_may_be_counted_from_the_end() -> None:
    a, b = Window(3), Window(5)
    assert nonnegative_dims({0: a, -1: b}, 4) == {0: a, 3: b}
    x = torch.ones(2, 3, 4)
    assert F.pad(x, pad_argument(3, {0: (1, 2), 2: (3, 0)})).shape == (5, 3, 7)


@pytest.mark.parametrize("wrong", [{"size": 0}, {"stride": 0}, {"dilation": 0}, {"padding": -1}, {"padding": (1, -1)}])
def test_invalid_arguments_raise(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Window(**{"size": 3, **wrong})
