"""Cost of calls: bytes sent and reduced, memory saved for the backward pass, and buffers that must be freed."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.checkpoint.state import layouts_of
from distconv.communication.transport import counted
from distconv.pipeline.runtime.p2p import P2P
from distconv.pipeline.runtime.placement import Placement
from distconv.pipeline.schedules.actions import Kind, Message
from distconv.pipeline.stage.stage_inputs import Minibatch
from tests.distconv.layouts import grid_over, normal

SHAPE = N, C, H, W = 2, 4, 12, 10
ROW, WHOLE = N * C * W * 8, math.prod((2, 4, 12, 10)) * 8
"""Bytes of a row of all samples and channels, and of all of x, in float64."""


def convolution(kernel: int, **options: Any) -> Callable[[Any], Any]:
    weight = normal(3, C, kernel, kernel)
    return lambda x: F.conv2d(x, weight, padding=kernel // 2, **options)


def normalize(x: Any) -> Any:
    return F.batch_norm(x, None, None, training=True)


def moved(*axes: str | None) -> Callable[[Any], Any]:
    return lambda x: x.redistribute(dc.Distribution(x.grid, axes))


# name: (call of x with its rows split over p ranks, bytes that all ranks send, bytes that each rank sums)
Cost = tuple[Callable[[Any], Any], Callable[[int], float], float]
COSTS: dict[str, Cost] = {
    "element by element": (lambda x: (x * 2 + x).relu().sigmoid(), lambda p: 0, 0),
    "in place": (lambda x: x.clone().mul_(2).add_(x), lambda p: 0, 0),
    "rows of all columns": (lambda x: x.sum(3), lambda p: 0, 0),
    "slice of columns": (lambda x: x[..., 1:4], lambda p: 0, 0),
    "slice of rows": (lambda x: x[:, :, 3:9], lambda p: 0, 0),
    "merged samples and channels": (lambda x: x.flatten(0, 1), lambda p: 0, 0),
    "transposed": (lambda x: x.transpose(2, 3), lambda p: 0, 0),
    "joined channels": (lambda x: torch.cat([x, x], 1), lambda p: 0, 0),
    "stacked": (lambda x: torch.stack([x, x]), lambda p: 0, 0),
    "pooling within blocks": (lambda x: F.max_pool2d(x, 2), lambda p: 0, 0),
    "nearest, twice as large": (lambda x: F.interpolate(x, scale_factor=2), lambda p: 0, 0),
    "convolution 1 x 1": (convolution(1), lambda p: 0, 0),
    "convolution 3 x 3": (convolution(3), lambda p: 2 * (p - 1) * ROW, 0),
    "convolution 5 x 5": (convolution(5), lambda p: 4 * (p - 1) * ROW, 0),
    "strided convolution": (convolution(3, stride=2), lambda p: (p - 1) * ROW, 0),
    "dilated convolution": (
        lambda x: F.conv2d(x, normal(3, C, 3, 3), padding=2, dilation=2),
        lambda p: 4 * (p - 1) * ROW,
        0,
    ),
    "pooling 3 x 3": (lambda x: F.max_pool2d(x, 3, 1, 1), lambda p: 2 * (p - 1) * ROW, 0),
    "sum": (torch.sum, lambda p: 0, 8),
    "sum of columns": (lambda x: x.sum(2), lambda p: 0, N * C * W * 8),
    "layout that it has": (moved(None, None, "h", None), lambda p: 0, 0),
    "replicated": (moved(None, None, None, None), lambda p: (p - 1) * WHOLE, 0),
    "columns split": (moved(None, None, None, "h"), lambda p: WHOLE - columns_that_stay(p), 0),
    "replicated, and split again": (
        lambda x: moved(None, None, "h", None)(moved(None, None, None, None)(x)),
        lambda p: (p - 1) * WHOLE,
        0,
    ),
}


def columns_that_stay(p: int) -> int:
    return sum(len(dc.block_range(W, p, i)) for i in range(p)) * N * C * (H // p) * 8


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", COSTS)
def test_bytes_that_are_sent_and_summed(comm: Any, name: str) -> None:
    call, sent, summed = COSTS[name]
    x = dc.scatter(normal(*SHAPE), dc.Distribution(grid_over(comm, h=comm.size), (None, None, "h", None)))
    with torch.no_grad(), counted() as traffic:
        call(x)
    assert comm.allreduce(sum(traffic.sent.values())) == sent(comm.size), traffic.sent
    assert sum(traffic.reduced.values()) == summed, traffic.reduced


@pytest.mark.ranks(2, 3)
def test_a_backward_pass_sends_what_the_forward_pass_sent_and_sums_each_weight_once(comm: Any) -> None:
    grid = grid_over(comm, h=comm.size)
    layer = dc.parallelize(nn.Conv2d(C, 3, 3, padding=1).double(), grid, broadcast=True)
    x = dc.scatter(normal(*SHAPE), dc.Distribution(grid, (None, None, "h", None))).requires_grad_()
    y = layer(x)
    with counted() as traffic:
        y.sum().backward()
    assert comm.allreduce(sum(traffic.sent.values())) == 2 * (comm.size - 1) * ROW
    weights = sum(8 * p.numel() for p in layer.parameters())
    assert 0 <= sum(traffic.reduced.values()) - weights - 8 < 400, traffic.reduced


KEPT: dict[str, tuple[Callable[[Any], Any], float]] = {
    "relu": (torch.relu, 1),
    "sigmoid": (torch.sigmoid, 1),
    "sum": (torch.sum, 0),
    "product with a number": (lambda x: x * 2, 0),
    "slice": (lambda x: x[:, :, 3:9], 0),
    "convolution 1 x 1": (convolution(1), 1),
    "convolution 3 x 3": (convolution(3), 2.3),
    "batch norm": (normalize, 1),
    "group norm": (lambda x: F.group_norm(x, 2), 1),
    "softmax": (lambda x: x.softmax(1), 1),
    "softmax of rows": (lambda x: x.softmax(2), 1),
    "average pooling": (lambda x: F.avg_pool2d(x, 3, 1, 1), 1.3),
    "max pooling": (lambda x: F.max_pool2d(x, 3, 1, 1), 2.3),
    "replicated": (moved(None, None, None, None), 0),
}
"""Calls, and how many tensors of the size of x may be kept for the backward pass. What is padded is copied."""


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", KEPT)
def test_what_autograd_keeps(comm: Any, name: str) -> None:
    call, tensors = KEPT[name]
    rows = 40 * comm.size
    whole = normal(N, C, rows, W)
    x = dc.scatter(whole, dc.Distribution(grid_over(comm, h=comm.size), (None, None, "h", None))).requires_grad_()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(x)
    assert y.requires_grad
    halo = 4 * ROW + 3 * C * 9 * 8 + 1000
    assert sum(kept.values()) <= tensors * 40 * ROW + halo, f"{sum(kept.values()) / (40 * ROW)} times the block of x"


def bytes_alive(least: int) -> int:
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.uint8 and x.nbytes >= least]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}.values())


@pytest.mark.ranks(2)
def test_payloads_between_stages_are_let_go_of_when_they_have_arrived(comm: Any) -> None:
    placement = Placement(2, (1, 1))
    box = P2P(comm, placement, placement.places[comm.rank], None, torch.device("cpu"))
    for step in range(4):
        message, batch = Message(Kind.F, step, 1), Minibatch(step, 4)
        if comm.rank == 0:
            box.send(message, 1, batch, [normal(100, 100)], loss=0.0, what="a test")
        else:
            found, _ = box.take(message, 0, batch, "a test")
            del found
        comm.Barrier()
    assert bytes_alive(50_000) <= 2 * 81_000 + 4096
    box.close()


@pytest.mark.ranks(2, 3)
def test_of_a_tied_weight_that_is_sharded_each_name_is_read_by_blocks(comm: Any) -> None:
    first, second = nn.Conv2d(6, 6, 1, bias=False), nn.Conv2d(6, 6, 1, bias=False)
    second.weight = first.weight
    model = dc.parallelize(nn.Sequential(first, second), grid_over(comm, c=comm.size), broadcast=True)
    found = [layouts_of(model)(f"model/{name}.weight", (6, 6, 1, 1)) for name in "01"]
    assert found[0] is not None and found[0] == found[1] == model[0].weight.dist
