"""Functions of the user's own: distributed tensors that they reach are never dropped from the gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere

SHAPE = (3, 2, 7, 4)


class OfList(torch.autograd.Function):
    @staticmethod
    def forward(ctx, factor, box):
        return factor * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def closing_over(x):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, factor):
            return [x * factor, factor][0]

        @staticmethod
        def backward(ctx, grad):
            return (grad * x).sum()

    return Scale


def reentrant_sine(x):
    return checkpoint(torch.sin, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x, f: OfList.apply(f, [x]), "OfList.apply .* has no distributed rule"),
        (lambda x, f: OfList.apply(f, {"x": (x,)}), "OfList.apply .* has no distributed rule"),
        (lambda x, f: closing_over(x).apply(f), "Scale.apply .* returns a DistTensor"),
        (lambda x, f: checkpoint(lambda d: x * d, f, use_reentrant=True), "use_reentrant=False"),
        (lambda x, f: checkpoint(lambda d: (d, x * d), f, use_reentrant=True), "use_reentrant=False"),
        (lambda x, f: checkpoint(reentrant_sine, x, use_reentrant=False), "Pass use_reentrant=False to both"),
    ],
)
@pytest.mark.ranks(1, 2, 3)
def test_a_function_that_reaches_a_distributed_tensor_is_refused(comm, call, match):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size)).requires_grad_()
    factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    raises_everywhere(comm, dc.UnsupportedOperation, match, lambda: call(x, factor))


@pytest.mark.ranks(1, 2, 3)
def test_reentrant_recomputation_of_a_gathered_loss_gives_the_gradients_of_one_process(comm):
    def run(x):
        factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        checkpoint(lambda d: dc.gather(x.sin() * d).square().sum(), factor, use_reentrant=True).backward()
        return factor.grad, dc.gather(x.grad)

    expected = run(normal(*SHAPE).requires_grad_())
    for axis in "nhc":
        found = run(dc.scatter(normal(*SHAPE), grid_over(comm, **{axis: comm.size})).requires_grad_())
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
