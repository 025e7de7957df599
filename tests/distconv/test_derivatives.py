"""Derivatives of derivatives: exact through all communication, refused where a backward pass has none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere


def penalised(model, x, whole):
    """A loss with a penalty on the gradient of the input, as WGAN-GP has it."""
    y = model(x)
    (slope,) = torch.autograd.grad(whole(y.square().mean()), [x], create_graph=True)
    return whole(y.sum()) + whole((slope.square().sum() - 1) ** 2)


def leaf(grid, axes, *shape):
    x = dc.scatter(normal(*shape), dc.Distribution(grid, axes)) if axes else normal(*shape)
    return x.detach().requires_grad_()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(1, 6))

    def forward(self, x):
        x = F.softplus(self.first(x)) * self.scale
        x = x - x.mean(0, keepdim=True)
        return torch.tanh(self.second(x)) + x.sum(1, keepdim=True) ** 2


@pytest.mark.parametrize("axis", ["n", "c"])
def test_a_penalty_on_gradients_is_that_of_one_process(comm, axis):
    torch.manual_seed(0)
    model = Network().double()
    twin = Network().double()
    twin.load_state_dict(model.state_dict())
    penalised(model, normal(7, 4).requires_grad_(), lambda y: y).backward()
    grid = grid_over(comm, **{axis: comm.size})
    x = leaf(grid, ("n", "c"), 7, 4)
    penalised(dc.parallelize(twin, grid), x, lambda y: y.replicated() if hasattr(y, "replicated") else y).backward()
    for (name, expected), found in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(dc.gather(found.grad), expected.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_redistribution_and_halos_have_derivatives_of_any_order(comm):
    for grid in grids(comm, "h"):
        x = leaf(grid, ("n", "c", "h", "w"), 3, 2, 7, 4)
        moved = x.redistribute(dc.Distribution(grid, (None, "h", None, None)))
        (first,) = torch.autograd.grad((moved**3).sum().replicated(), [x], create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum().replicated(), [x])
        torch.testing.assert_close(dc.gather(second), 36 * normal(3, 2, 7, 4) ** 3, rtol=1e-12, atol=1e-12)


LAYERS = {
    "a convolution": lambda x, w: F.conv2d(x, w, padding=1),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "group and instance norm": lambda x, w: F.group_norm(x, 1),
    "a maximum or minimum": lambda x, w: x.amax((0, 2, 3)),
}


@pytest.mark.ranks(at_least=2, at_most=4)
@pytest.mark.parametrize("what", LAYERS)
def test_what_has_no_second_derivative_refuses_one_on_all_ranks(comm, what):
    grid = grid_over(comm, h=comm.size)
    x, w = leaf(grid, ("n", "c", "h", "w"), 2, 2, 8, 5), normal(2, 2, 3, 3).requires_grad_()
    y = (LAYERS[what](x, w) ** 2).sum().replicated()
    raises_everywhere(
        comm,
        dc.UnsupportedOperation,
        rf"a second derivative \(create_graph=True\) of {what} has no rule",
        lambda: torch.autograd.grad(y, [x], create_graph=True),
    )
