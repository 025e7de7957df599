"""The two halves of a backward pass against the whole of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from distconv.pipeline.stage.split_backward import backward_of_inputs


class Double(torch.autograd.Function):
    """A function written in Python."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return Double.apply(x, self.weight)


class Tied(nn.Module):
    """One weight in two operators, and one of them through a transpose."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.second(F.linear(self.first(x).relu(), self.first.weight.t()))


class Product(nn.Module):
    """Matrices that are parameters on both sides, and one that is transposed."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return self.left @ x @ self.right.t()


class Branches(nn.Module):
    """Several outputs, one of them needs no gradient, and a parameter without use."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.spare = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.one(x), self.two(x).relu(), x.detach()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Triangle(nn.Module):
    """An operator of several results, of which the second alone is used."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ torch.linalg.qr(self.weight)[1]


class Memory(nn.Module):
    """The last hidden state or the last cell of an LSTM, its results 1 and 2."""

    def __init__(self, which):
        super().__init__()
        self.inner, self.which = nn.LSTM(4, 3), which

    def forward(self, x):
        return self.inner(x)[1][self.which]


MODULES = {
    "linear layers": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (5, 4)),
    "one linear layer": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "a linear layer on three dimensions": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)),
        (3, 2, 7, 8),
    ),
    "transposed convolutions": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), (3, 2, 7)),
    "normalisation": (lambda: nn.Sequential(nn.LayerNorm(4), nn.PReLU(), nn.GroupNorm(2, 4)), (5, 4)),
    "a function written in Python": (Written, (5, 4)),
    "tied weights": (Tied, (5, 4)),
    "products of parameters": (Product, (5, 4)),
    "branches": (Branches, (5, 4)),
    "weight norm": (lambda: weight_norm(nn.Linear(4, 3)), (5, 4)),
    "attention": (Attention, (5, 2, 4)),
    "a triangle of a matrix": (Triangle, (5, 4)),
    "a last hidden state": (lambda: Memory(0), (5, 2, 4)),
    "a last cell": (lambda: Memory(1), (5, 2, 4)),
    "a frozen weight": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)),
        (5, 4),
    ),
    "a frozen bias": (lambda: frozen_bias(nn.Linear(4, 3)), (5, 4)),
}  # fmt: skip


def frozen_bias(layer):
    layer.bias.requires_grad_(False)
    return layer


def outputs_and_gradients(module, x):
    values = module(x)
    outputs = [v for v in (values if isinstance(values, tuple) else (values,)) if v.requires_grad]
    return outputs, [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape).exp() for o in outputs]


FLOAT32 = [(name, torch.float32) for name in MODULES if "last" in name]  # one operator of oneDNN there


@pytest.mark.parametrize(("name", "dtype"), FLOAT32 + [(name, torch.float64) for name in MODULES])
def test_two_halves_have_the_bits_of_the_whole(name, dtype):
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module = make().to(dtype)
    whole = copy.deepcopy(module)
    for number in range(2):  # gradients add up
        x = torch.randn(shape, dtype=dtype).requires_grad_()
        y = x.detach().clone().requires_grad_()
        outputs, gradients = outputs_and_gradients(module, x)
        half = backward_of_inputs(outputs, gradients, [x], list(module.parameters()))
        torch.autograd.backward(*outputs_and_gradients(whole, y))
        assert torch.equal(x.grad, y.grad), number
        half.run()
        for (parameter, p), q in zip(module.named_parameters(), whole.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), parameter
            assert p.grad is None or torch.equal(p.grad, q.grad), parameter


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.ConvTranspose1d(4, 4, 1)])
def test_the_weights_of_products_wait_for_the_second_half(layer):
    x = torch.ones(2, 4, 4, requires_grad=True)
    outputs, gradients = outputs_and_gradients(layer, x)
    half = backward_of_inputs(outputs, gradients, [x], list(layer.parameters()))
    assert x.grad is not None
    assert layer.weight.grad is None
    half.run()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.PReLU(4)])
def test_what_is_cheap_beside_products_does_not_wait(layer):
    """Its graph would be held until the second half, for nothing."""
    x = torch.linspace(-1, 1, 32).view(2, 4, 4).requires_grad_()
    outputs, gradients = outputs_and_gradients(layer, x)
    half = backward_of_inputs(outputs, gradients, [x], list(layer.parameters()))
    assert half.edges == []
    expected = copy.deepcopy(layer).requires_grad_()
    expected.zero_grad()
    torch.autograd.backward(expected(x.detach()), gradients)
    for found, known in zip(layer.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, known.grad)


def products(node):
    """The products that a result was made by."""
    if node is not None:
        if "Addmm" in node.name():
            yield node
        for used, _ in node.next_functions:
            yield from products(used)


def test_an_operator_runs_once_for_its_inputs_and_once_for_its_weights():
    ran = []
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    x = torch.ones(2, 4, requires_grad=True)
    y = layers(x)
    for node in products(y.grad_fn):
        node.register_hook(lambda inputs, _: ran.append([each is not None for each in inputs]))
    half = backward_of_inputs([y], [torch.ones_like(y)], [x], list(layers.parameters()))
    first, ran[:] = ran[:], []
    half.run()
    assert first == [[False, True, False]] * 3  # bias, input, weight
    assert ran == [[True, False, True]] * 3
