"""Recomputed blocks: gradients and running statistics of one process, whatever ranks without elements save."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere

again = functools.partial(checkpoint, use_reentrant=False)

TALL = {
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive maximum": lambda x: F.adaptive_max_pool2d(x, (2, 1)),
    "maximum": lambda x: F.max_pool2d(x, 7),
    "average": lambda x: F.avg_pool2d(x, 7),
    "convolution": lambda x: F.conv2d(x, x.new_ones(4, 4, 7, 7)),
    "bilinear": lambda x: F.interpolate(x, size=(1, 2), mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, size=(1, 2)),
    "slice": lambda x: x[:, :, :1] * 2,
    "cropped": lambda x: F.pad(x, (0, 0, -3, -3)).exp(),
    "unfold": lambda x: x.unfold(2, 7, 7).mean(-1),
    "rows": lambda x: x[:, :, [0, 2]].sin(),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "gathered": lambda x: dc.gather(x)[:, :, :1].tanh(),
}
"""Ends of a block, with fewer rows than ranks."""


class Net(nn.Module):
    """``way`` calls two blocks of it with the input; both have running statistics."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm, nn.MaxPool2d(7))
        self.way = way
        self.double()

    def forward(self, x):
        return self.way(self.first, self.second, x).sin()


def train(net, images):
    """Gradients and statistics after two steps, and the gradient of the input."""
    for step in range(2):
        x = images(step).requires_grad_()
        net(x).square().sum().backward()
    gradients = {name: dc.gather(p.grad) for name, p in net.named_parameters() if p.grad is not None}
    return gradients | {name: dc.gather(b) for name, b in net.named_buffers()} | {"x": dc.gather(x.grad)}


def equals_one_process(comm, way):
    expected = train(Net(way), lambda step: normal(4, 3, 7, 9, seed=step))
    for grid in grids(comm, "nch"):
        net = dc.parallelize(Net(way), grid)
        found = train(net, lambda step, grid=grid: dc.scatter(normal(4, 3, 7, 9, seed=step), grid))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("end", TALL)
@pytest.mark.ranks(2, 3)
def test_a_block_that_ends_with_fewer_rows_than_ranks_is_recomputed_exactly(comm, end):
    equals_one_process(comm, lambda first, second, x: again(lambda x: TALL[end](first(x)), x))


def nested(first, second, x):
    return again(lambda x: again(second, again(first, x)).sin(), x)


def several_results(first, second, x):
    made = again(lambda x: {"deep": second(first(x)), "rows": [first(x)[:, :, :1] * 2]}, x)
    return made["deep"] + made["rows"][0].mean((2, 3), keepdim=True)


def by_closure(first, second, x):
    kept = []

    def block(x):
        kept.append(first(x)[:, :, 6:])
        return second(first(x))

    return again(block, x) + kept[0].mean((2, 3), keepdim=True)


def changed_in_place(first, second, x):
    return again(lambda x: F.relu(second(first(x)), inplace=True), x).mul(2).add_(1)


def with_a_plain_tensor(first, second, x):
    factor = torch.ones(3, 1, 1, dtype=torch.float64, requires_grad=True)
    return again(lambda x, factor: second(first(x * factor.exp())), x, factor)


def twice(first, second, x):
    y = again(lambda x: second(first(x)), x)
    y.square().sum().backward(retain_graph=True)
    return y


def two_losses(first, second, x):
    y, z = again(lambda x: (second(x.repeat(1, 2, 1, 1)[:, :4]), first(x)[:, :, :1].sin()), x)
    z.sum().backward()
    return y


def penalized(first, second, x):
    y = again(lambda x: second(first(x)), x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y + slope.square().mean((1, 2, 3), keepdim=True)


def policy(context, operator, *args, **kwargs):
    saved = operator in (torch.ops.aten.convolution.default, torch.ops.aten.relu.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(first, second, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return again(lambda x: second(first(x)), x, context_fn=contexts)


def on_the_host(first, second, x):
    with torch.autograd.graph.save_on_cpu():
        return second(first(x)) + again(lambda x: second(first(x)), x)


def reentrant(first, second, x):
    y = checkpoint(lambda x, factor: second[:2](first(x) * factor), x, 2.0, use_reentrant=True)
    return checkpoint(lambda y: (F.max_pool2d(y, 7), y[:, :, :1, :1] * 2), y, use_reentrant=True)[0]


def reentrant_without_gradients(first, second, x):
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        y = checkpoint(first, x.detach(), use_reentrant=True)
    assert not y.requires_grad
    return second(y + x.mean())


def last_statistics_stay(first, second, x):
    return again(second[:2], first(x))


WAYS = (nested, several_results, by_closure, changed_in_place, with_a_plain_tensor, twice, two_losses, penalized)
WAYS += (selective, on_the_host, reentrant, reentrant_without_gradients, last_statistics_stay)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.ranks(2, 3)
def test_every_way_to_recompute_equals_one_process(comm, way):
    equals_one_process(comm, way)


@pytest.mark.ranks(2, 3)
def test_a_gradient_taken_in_a_block_with_running_statistics_is_rejected(comm):
    norm = nn.BatchNorm2d(3).double()

    def block(x):
        (slope,) = torch.autograd.grad(norm(x.sin()).square().sum(), x, create_graph=True)
        return slope

    x = dc.scatter(normal(4, 3, 7, 9), grid_over(comm, h=comm.size)).requires_grad_()
    raises_everywhere(
        comm, dc.UnsupportedOperation, "Compute the gradient outside of the block", lambda: again(block, x)
    )


@pytest.mark.ranks(2)
def test_a_block_lets_go_of_its_input_with_the_backward_pass(comm):
    net = dc.parallelize(Net(None), grid_over(comm, h=2))
    again(torch.neg, torch.ones(1))  # torch imports torch._dynamo at the first call, and keeps its frames until then
    gc.collect()
    gc.disable()
    try:
        x = dc.scatter(normal(4, 3, 7, 9), grid_over(comm, h=2)) * 1
        there = weakref.ref(x)
        loss = again(lambda x: net.second(net.first(x)), x).sum()
        del x
        assert there() is not None
        loss.backward()
        assert there() is None
    finally:
        gc.enable()


@pytest.mark.ranks(1, 2, 3)
def test_an_input_that_is_changed_in_place_before_a_block_is_computed_again_is_refused(comm):
    """As torch does: the gradient would be that of another input. Also where it is other ranks' rows alone."""

    def backward(x, index):
        hidden = x.requires_grad_() * 2
        y = again(lambda h: F.conv2d(torch.sin(h), normal(3, 3, 3, 3), padding=1).exp(), hidden)
        with torch.no_grad():
            hidden[:, :, index] = 0
        y.square().sum().backward()

    for rows in (7, 2):
        for index in (slice(None), slice(1)):
            for x in (normal(2, 3, rows, 5), dc.scatter(normal(2, 3, rows, 5), grid_over(comm, h=comm.size))):
                call = functools.partial(backward, x, index)
                raises_everywhere(comm, RuntimeError, "modified by an inplace operation", call, same_text=False)
