"""Elementwise operators: values, alignment of operands, and the axes over which gradients are all-reduced."""

from __future__ import annotations

import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, close, same_as_one_process

SHAPE = (3, 2, 7, 4)


ACTIVATIONS = """
relu relu6 elu selu celu leaky_relu hardtanh hardswish hardsigmoid silu mish rrelu gelu logsigmoid hardshrink
softshrink tanhshrink softsign softplus sigmoid tanh threshold
""".split()


def activation(name, **options):
    """One of torch's functions, with the arguments that it cannot do without."""
    return partial(getattr(F, name), **({"threshold": 0.1, "value": -2.0} if name == "threshold" else {}), **options)


IN_PLACE = {
    **{name: activation(name, inplace=True) for name in [*ACTIVATIONS[:12], "threshold"]},
    **{f"{name}_": getattr(F, f"{name}_") for name in "relu elu selu celu leaky_relu hardtanh rrelu".split()},
    "torch.relu_": torch.relu_,
    "torch.celu_": torch.celu_,
    "module": nn.SiLU(inplace=True),
    "add_": lambda x: x.add_(0.1, alpha=2),
    "clamp_": lambda x: x.clamp_(min=torch.zeros(4).double()),
    "mul_": lambda x: x.mul_(torch.arange(7).double().view(7, 1)),
    "masked_fill_": lambda x: x.masked_fill_(x.detach() > 0.5, 3.0),
    "operator": lambda x: operator.iadd(x, 1),
    "copy_": lambda x: x.copy_(torch.ones(7, 4).double()),
}


@pytest.mark.parametrize("name", IN_PLACE)
@UP_TO_SIX_RANKS
def test_in_place_operators_equal_one_process(comm, name):
    def run(x):
        y = x * 2
        z = IN_PLACE[name](y)
        assert z is y
        return z * 1

    for grid in grids(comm, "ch"):
        same_as_one_process(grid, run, normal(*SHAPE))


def test_an_in_place_operator_does_not_grow_its_target(comm):
    x = dc.scatter(normal(1, 4), grid_over(comm, n=comm.size))
    raises_everywhere(comm, dc.ShapeError, "doesn't match the broadcast shape", lambda: x.add_(normal(3, 4)))


def test_writing_into_a_plain_tensor_raises(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    if comm.size > 1:
        raises_everywhere(comm, dc.UnsupportedOperation, "into a plain tensor", lambda: normal(*SHAPE).add_(x))
    recorded = normal(2).requires_grad_() * 1
    scale = x.sum()
    raises_everywhere(comm, dc.UnsupportedOperation, "into a plain tensor", lambda: recorded.mul_(scale))
    raises_everywhere(comm, dc.UnsupportedOperation, "out=", lambda: torch.add(x, x, out=normal(*SHAPE)))


def test_a_replicated_number_may_scale_plain_tensors_outside_of_autograd(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    gradient, scale = normal(5, seed=1), x.square().sum().sqrt()
    expected = gradient * normal(*SHAPE).norm()
    assert gradient.mul_(scale) is gradient
    close(gradient, expected, "scaled gradient")
    weight = gradient.clone().requires_grad_()
    with torch.no_grad():
        weight.add_(x.mean())
    close(weight.detach(), expected + normal(*SHAPE).mean(), "changed parameter")


def test_a_result_may_go_into_a_distributed_tensor_outside_of_autograd(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    y = torch.zeros_like(x)
    assert torch.maximum(x, x.neg(), out=y) is y
    close(dc.gather(y), normal(*SHAPE).abs(), "maximum")
    assert torch.mul(normal(*SHAPE), normal(*SHAPE[1:]), out=y) is y  # a moment made of what is plain
    close(dc.gather(y), normal(*SHAPE) * normal(*SHAPE[1:]), "mul of plain tensors")
    raises_everywhere(comm, dc.UnsupportedOperation, "out=", lambda: torch.mul(x.requires_grad_(), 2, out=y))


def test_a_plain_tensor_converted_like_a_distributed_one_stays_plain(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    for y in (torch.ones(2).type_as(x), torch.ones(2).to(x)):
        assert type(y) is torch.Tensor and y.dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: torch.where(x > 0), "condition alone"),
    ],
)
@pytest.mark.ranks(at_least=2)
def test_a_function_without_a_rule_raises_with_a_suggested_fix(comm, call, match):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, match, lambda: call(x))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, **odd: torch.add(x, x, **odd),
        lambda x, **odd: x.clamp(0, **odd),
        lambda x, **odd: x.add_(1, **odd),
        lambda x, **odd: x.clone(**odd),
        lambda x, **odd: torch.where(x > 0, x, x, **odd),
        lambda x, **odd: torch.prelu(x, torch.ones(1).double(), **odd),
        lambda x, **odd: torch.dropout(x, 0.5, True, **odd),
        lambda x, **odd: torch.max_pool2d(x, 2, **odd),
        lambda x, **odd: torch.group_norm(x, 2, **odd),
        lambda x, **odd: torch.layer_norm(x, (4,), **odd),
        lambda x, **odd: torch.pixel_shuffle(x, 1, **odd),
        lambda x, **odd: torch._C._nn.avg_pool2d(x, 2, **odd),
        lambda x, **odd: torch.cosine_similarity(x, x, **odd),
        lambda x, **odd: F.one_hot(x.long().abs(), **odd),
    ],
)
def test_an_unknown_option_is_never_swallowed(comm, call):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    with pytest.raises(TypeError):
        call(normal(*SHAPE), odd=1)
    raises_everywhere(comm, TypeError, "odd|invalid combination", lambda: call(x, odd=1), same_text=False)
