"""Derivatives of derivatives are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.autograd.derivatives import differentiable_gradients, first_order_only
from tests.distconv.layouts import grid_over, grids, normal

FEW_RANKS = pytest.mark.ranks(2, 3, 4)


def whole(y):
    return y.replicated() if isinstance(y, dc.DistTensor) else y


def leaf(grid, axes, *shape):
    x = dc.scatter(normal(*shape), dc.Distribution(grid, axes)) if grid else normal(*shape)
    return x.detach().requires_grad_()


def layouts(comm):
    """Axes by themselves, or pairs of them."""
    found = [{axis: comm.size} for axis in "nch"]
    if comm.size == 4:
        found = [{"c": 2, "h": 2}, {"n": 2, "w": 2}, {"h": 4}]
    return [grid_over(comm, **each) for each in found]


def assert_near(found, expected, what):
    torch.testing.assert_close(dc.gather(found).detach(), expected.detach(), rtol=1e-9, atol=1e-11, msg=what)


LAYERS: dict[str, tuple[Any, tuple[int, ...], list[tuple[int, ...]]]] = {
    "conv1d": (lambda x, w, b: F.conv1d(x.mean(2), w, b, padding=1), (2, 3, 2, 7), [(4, 3, 3), (4,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 7, 6), [(4, 3, 3, 3), (4,)]),
    "conv2d, stride and dilation": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=(0, 2), dilation=(1, 2)), (2, 3, 7, 6), [(4, 3, 2, 3)]
    ),
    "conv2d, groups": (lambda x, w: F.conv2d(x, w, padding=1, groups=12), (2, 12, 5, 6), [(12, 1, 3, 3)]),
    "conv2d, ranks without outputs": (lambda x, w: F.conv2d(x, w, stride=3), (1, 3, 3, 3), [(1, 3, 3, 3)]),
    "conv3d": (lambda x, w: F.conv3d(x.unsqueeze(2), w, padding=1), (2, 2, 4, 3), [(2, 2, 3, 3, 3)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1), (2, 3, 4, 5), [(3, 4, 3, 3), (4,)]
    ),
    "conv_transpose2d, ranks without inputs": (
        lambda x, w: F.conv_transpose2d(x, w), (1, 1, 1, 1), [(1, 1, 1, 1)]
    ),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (3, 4, 5, 6), [(4,), (4,)]),
    "batch norm, no channels somewhere": (
        lambda x, w: F.batch_norm(x, torch.zeros(1).double(), torch.ones(1).double(), w), (2, 1, 3, 2), [(1,)]
    ),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 5, 6), [(4,), (4,)]),
    "instance norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), (3, 4, 5, 6), [(4,), (4,)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (5, 6), w, b), (3, 4, 5, 6), [(5, 6), (5, 6)]),
    "amax": (lambda x: x.amax((0, 2)), (3, 4, 5, 6), []),
    "max of everything": (lambda x: x.max() * x, (3, 4, 5, 6), []),
    "std": (lambda x: x.std(3), (1, 4, 2, 6), []),
    "max pooling": (lambda x: F.max_pool2d(x, 3, 2, 1), (3, 4, 5, 6), []),
    "average pooling": (lambda x: F.avg_pool2d(x, 3, 2, 1), (3, 4, 2, 6), []),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.zeros(1, 2, 3).long()), (1, 4, 2, 3), []),
    "bilinear interpolation": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), (1, 4, 2, 6), []),
}  # fmt: skip


def derivatives(layer, grid, shape, weights):
    """First derivatives of a loss by all that goes in, and those of the sum of their squares."""
    given = [leaf(grid, ("n", "c", "h", "w"), *shape)]
    given += [(normal(*each, seed=i + 1) / 2).requires_grad_() for i, each in enumerate(weights)]
    first = torch.autograd.grad(whole((layer(*given) ** 3).sum()), given, create_graph=True)
    return [*first, *torch.autograd.grad(sum(whole((g**2).sum()) for g in first), given)]


@pytest.mark.long
@FEW_RANKS
@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_of_a_layer_are_those_of_one_process(comm, name):
    expected = derivatives(LAYERS[name][0], None, *LAYERS[name][1:])
    for grid in layouts(comm):
        found = derivatives(LAYERS[name][0], grid, *LAYERS[name][1:])
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_near(*pair, f"derivative {number} on {grid}")


def test_redistribution_and_halos_have_derivatives_of_any_order(comm):
    for grid in grids(comm, "h"):
        x = leaf(grid, ("n", "c", "h", "w"), 3, 2, 7, 4)
        moved = x.redistribute(dc.Distribution(grid, (None, "h", None, None)))
        (first,) = torch.autograd.grad((moved**3).sum().replicated(), [x], create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum().replicated(), [x])
        torch.testing.assert_close(dc.gather(second), 36 * normal(3, 2, 7, 4) ** 3, rtol=1e-12, atol=1e-12)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @first_order_only("a cube")
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


def test_a_backward_pass_that_is_marked_refuses_to_be_differentiated():
    x = normal(3).requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(Cube.apply(x).sum(), x)[0], 3 * x.detach() ** 2)
    with pytest.raises(dc.UnsupportedOperation, match=r"a second derivative .* of a cube has no rule"):
        torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)


def test_each_input_counts_by_itself_though_another_was_computed_from_it():
    x = normal(3).requires_grad_()
    y = 2 * x
    by_x, by_z, by_y = differentiable_gradients(
        lambda a, b, c: a * c**2, (x, None, y), (True, True, True), torch.ones(3).double()
    )
    assert by_z is None
    torch.testing.assert_close(by_x, 4 * x**2)  # y^2, and nothing by way of y
    torch.testing.assert_close(by_y, 4 * x**2)  # 2 x y
    (second,) = torch.autograd.grad(by_x.sum(), x)
    torch.testing.assert_close(second, 8 * x)  # now by way of y
    assert differentiable_gradients(lambda a, b: a * b, (x, y), (False, True), torch.ones(3).double())[0] is None
