"""Cost of calls: bytes sent and summed, and memory that autograd keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import distconv as dc
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import grid_over, normal

SHAPE = N, C, H, W = 2, 4, 12, 10
ROW, WHOLE = N * C * W * 8, math.prod((2, 4, 12, 10)) * 8
"""Bytes of a row of all samples and channels, and of all of x, in float64."""


def convolution(kernel: int, **options: Any) -> Callable[[Any], Any]:
    weight = normal(3, C, kernel, kernel)
    return lambda x: F.conv2d(x, weight, padding=kernel // 2, **options)


def normalize(x: Any) -> Any:
    return F.batch_norm(x, None, None, training=True)


def redistribute_to(*axes: str | None) -> Callable[[Any], Any]:
    return lambda x: x.redistribute(dc.Distribution(x.grid, axes))


# (call of x with its rows split over p ranks, bytes that all ranks send, bytes that each rank sums)
Cost = tuple[Callable[[Any], Any], Callable[[int], float], float]


def unmoved_bytes(p: int) -> int:
    return sum(len(dc.block_range(W, p, i)) for i in range(p)) * N * C * (H // p) * 8


def check_bytes(comm: Any, cost: Cost) -> None:
    """Count the bytes of a forward pass."""
    call, sent, summed = cost
    x = dc.scatter(normal(*SHAPE), dc.Distribution(grid_over(comm, h=comm.size), (None, None, "h", None)))
    with torch.no_grad(), count_traffic() as traffic:
        call(x)
    assert comm.allreduce(sum(traffic.sent.values())) == sent(comm.size), traffic.sent
    assert sum(traffic.reduced.values()) == summed, traffic.reduced


def check_saved_tensors(comm: Any, call: Callable[[Any], Any], tensors: float) -> None:
    """Check that autograd saves at most ``tensors`` tensors of the size of x; padding copies its input."""
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
