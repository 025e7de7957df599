"""Elementwise operators: blocks as they are, operands aligned, gradients summed over just the right axes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.core.layouts import counting, grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import UP_TO_SIX_RANKS, built, module_as_in_one_process, same_as_one_process

SHAPE = (3, 2, 7, 4)

UNARY = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": lambda x: x.tanh(),
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "exp": lambda x: x.exp(),
    "abs": abs,
    "power": lambda x: x**3,
    "negative": lambda x: -x,
    "reversed operators": lambda x: 2 / (3 - (1 + 2 * x)),
    "square root": lambda x: (x * x + 1).sqrt(),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked_fill": lambda x: x.masked_fill(x > 0.3, 2.0),
    "float32 and back": lambda x: x.float().double(),
    "clone": lambda x: x.clone() * 2,
    "detach": lambda x: x * x.detach(),
    "zeros_like": lambda x: x + torch.zeros_like(x),
    "contiguous": lambda x: x.contiguous() * 2,
    "in place": lambda x: F.relu_((x * 2).add_(0.1)),
    "dropout in evaluation": lambda x: F.dropout(x * 2, 0.5, training=False),
    "comparison": lambda x: (x > 0).double() * x,
}


@pytest.mark.parametrize("name", UNARY)
@UP_TO_SIX_RANKS
def test_one_operand_equals_one_process(comm, name):
    for grid in grids(comm, "nh"):
        same_as_one_process(grid, UNARY[name], normal(*SHAPE))


PLAIN = [SHAPE, (1, 2, 1, 1), (2, 1, 1), (7, 1), (4,), (1,), (), (3, 1, 7, 4), (5, 1, 1, 1, 1)]


@pytest.mark.parametrize("other", PLAIN)
@UP_TO_SIX_RANKS
def test_a_plain_operand_gets_its_whole_gradient(comm, other):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda x, w: x * w + w, normal(*SHAPE), plain=(normal(*other, seed=1),))


@pytest.mark.parametrize("other", [SHAPE, (1, 2, 7, 4), (3, 2, 1, 1), (1, 1, 7, 1), (3, 1, 1, 4)])
def test_split_operands_of_different_extents_are_aligned(comm, other):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda a, b: a * b - b, normal(*SHAPE), normal(*other, seed=1))
        same_as_one_process(grid, lambda a, b: b / (1 + a * a), normal(*SHAPE), normal(*other, seed=1))


def test_operands_of_any_two_layouts_are_aligned(comm):
    shape = (5, 7, 3)
    a, b = normal(*shape), normal(*shape, seed=1)
    for one in twenty_layouts(comm, shape)[::3]:
        for other in twenty_layouts(comm, shape)[::4]:
            x, y = (dc.scatter(t.clone(), d).requires_grad_() for t, d in ((a, one), (b, other)))
            (x * y).sum().backward()
            assert torch.equal(dc.gather(x.grad), b), (one, other)
            assert torch.equal(dc.gather(y.grad), a), (one, other)


def test_a_tensor_of_one_split_element_broadcasts(comm):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda a, b: a + b, normal(1, 1, 1, 1), normal(*SHAPE, seed=1))


@pytest.mark.parametrize(
    "function", [torch.maximum, torch.atan2, torch.lerp, torch.addcmul, torch.where], ids=lambda f: f.__name__
)
def test_functions_of_several_operands(comm, function):
    calls = {
        torch.lerp: lambda a, b: torch.lerp(a, b, 0.3),
        torch.addcmul: lambda a, b: torch.addcmul(a, a, b, value=0.5),
        torch.where: lambda a, b: torch.where(a > b, a, b),
    }
    for grid in grids(comm, "nh"):
        same_as_one_process(grid, calls.get(function, function), normal(*SHAPE), normal(*SHAPE, seed=1))


@pytest.mark.parametrize("slopes", [1, 2])
def test_prelu_learns_its_slopes(comm, slopes):
    for grid in grids(comm, "nhw"):
        module_as_in_one_process(grid, built(lambda: nn.PReLU(slopes)), normal(*SHAPE))


def test_whole_numbers_and_truth_values(comm):
    for grid in grids(comm, "nh"):
        same_as_one_process(grid, lambda x: (x % 3 == 1) & (x > 20) | ~(x < 100), counting(*SHAPE).long())


def test_empty_blocks_go_along(comm):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda a, b: (a * b).relu(), normal(1, 2, 2, 1), normal(1, 2, 1, 1, seed=1))


def test_shapes_that_do_not_broadcast_are_refused_in_torchs_words(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    match = r"size of tensor a \(4\) must match the size of tensor b \(5\)"
    with pytest.raises(RuntimeError, match=match):
        normal(*SHAPE) + normal(5)
    raises_everywhere(comm, dc.ShapeError, match, lambda: x + normal(5))


def test_an_in_place_operator_does_not_grow_its_target(comm):
    x = dc.scatter(normal(1, 4), grid_over(comm, n=comm.size))
    raises_everywhere(comm, dc.ShapeError, "doesn't match the broadcast shape", lambda: x.add_(normal(3, 4)))


def test_writing_into_a_plain_tensor_is_refused(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "into a plain tensor", lambda: normal(*SHAPE).add_(x))
    raises_everywhere(comm, dc.UnsupportedOperation, "out=", lambda: torch.add(x, x, out=normal(*SHAPE)))


def test_dropout_in_training_is_refused_until_its_mask_is_that_of_one_process(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "dropout with p=0.5", lambda: F.dropout(x, 0.5))
