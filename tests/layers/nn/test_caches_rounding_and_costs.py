"""Caches, rounding and cost of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import grid_over, normal
from tests.layers.cache_keys import check_cache_keys
from tests.layers.costs import ROW, C, Cost, H, N, W, check_bytes, check_saved_tensors, convolution, normalize
from tests.layers.rounding import FLOATS, SHAPE, check_rounded_once, with_exact_operands

WEIGHTS = {1: normal(2, 4, 3, 3), 2: normal(4, 2, 3, 3, seed=1), 3: normal(4, 2, 3, 3, seed=2)}


def convolution_options(channels: int = 1, **options: Any) -> Callable[[Any], Any]:
    return lambda x: F.conv2d(x, WEIGHTS[channels], **options)


OPERATORS: dict[str, list[Callable[[Any], Any]]] = {
    "convolution": [
        convolution_options(),
        convolution_options(padding=1),
        convolution_options(stride=2),
        convolution_options(dilation=2),
        convolution_options(2, groups=2),
        convolution_options(stride=(1, 2)),
        convolution_options(padding=(1, 2)),
        lambda x: F.conv2d(x, WEIGHTS[1][:, :, :2]),
        lambda x: F.conv2d(x[:, :, :-1], WEIGHTS[1]),
    ],
    "transposed convolution": [
        lambda x: F.conv_transpose2d(x, WEIGHTS[2]),
        lambda x: F.conv_transpose2d(x, WEIGHTS[2], stride=2),
        lambda x: F.conv_transpose2d(x, WEIGHTS[2], stride=2, output_padding=1),
        lambda x: F.conv_transpose2d(x, WEIGHTS[2], padding=1),
        lambda x: F.conv_transpose2d(x, WEIGHTS[2], dilation=2),
    ],
    "pooling": [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
        lambda x: F.adaptive_avg_pool2d(x, 3),
        lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    ],
    "interpolation": [
        lambda x: F.interpolate(x, size=(5, 4)),
        lambda x: F.interpolate(x, size=(5, 6)),
        lambda x: F.interpolate(x, size=(5, 4), mode="nearest-exact"),
        lambda x: F.interpolate(x, size=(5, 4), mode="bilinear"),
        lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True),
        lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear", recompute_scale_factor=True),
    ],
    "padding": [
        lambda x: F.pad(x, (1, 2, 2, 1)),
        lambda x: F.pad(x, (1, 2, 2, 1), value=1.5),
        lambda x: F.pad(x, (2, 1, 2, 1)),
        *(lambda x, m=mode: F.pad(x, (1, 2, 2, 1), m) for mode in ("reflect", "replicate", "circular")),
    ],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_calls_that_differ_in_one_thing_are_not_mixed_up(comm: Any, name: str) -> None:
    check_cache_keys(comm, OPERATORS[name])


WEIGHT, FILTERS = normal(6, seed=1).exp(), normal(4, 6, 3, 3, seed=2)


def normalization_options(make: Callable[[], nn.Module]) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        layer = make()
        with torch.no_grad():
            layer.weight.copy_(WEIGHT[: len(layer.weight)].bfloat16())
        return layer.to(x.dtype)(x)

    return call


ONCE: dict[str, Callable[[Any], Any]] = {
    "batch norm": normalization_options(lambda: nn.BatchNorm2d(6)),
    "batch norm in evaluation": with_exact_operands(lambda x, m, v: F.batch_norm(x, m, v), WEIGHT * 3, WEIGHT),
    "instance norm": normalization_options(lambda: nn.InstanceNorm2d(6, affine=True)),
    "group norm": normalization_options(lambda: nn.GroupNorm(2, 6)),
    "layer norm": lambda x: F.layer_norm(x, (7, 9)),
    "layer norm of channels": lambda x: F.layer_norm(x, (6, 7, 9)),
    "average pooling": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive pooling": lambda x: F.adaptive_avg_pool2d(x, 1),
    "convolution": with_exact_operands(lambda x, w: F.conv2d(x, w, padding=1), FILTERS),
    "transposed convolution": with_exact_operands(lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1)), FILTERS),
    "linear": with_exact_operands(lambda x, w: F.linear(x, w), normal(4, 9)),
    "bilinear": lambda x: F.interpolate(x, size=(5, 4), mode="bilinear"),
    "squared error": with_exact_operands(F.mse_loss, normal(*SHAPE, seed=3)),
    "absolute error": with_exact_operands(F.l1_loss, normal(*SHAPE, seed=3)),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(3 * 63).view(3, 7, 9) % 6),
    "cross entropy of labels that are smoothed": lambda x: F.cross_entropy(
        x, torch.arange(3 * 63).view(3, 7, 9) % 6, label_smoothing=0.1
    ),
    "binary cross entropy": with_exact_operands(F.binary_cross_entropy_with_logits, normal(*SHAPE, seed=3).sigmoid()),
}
ROUNDED_ON_EACH_RANK = ("convolution", "transposed convolution", "linear")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ONCE)
def test_results_and_gradients_are_rounded_once(comm: Any, name: str) -> None:
    check_rounded_once(comm, ONCE[name], 1 + 2 * (name in ROUNDED_ON_EACH_RANK))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [nn.BatchNorm2d, lambda n: nn.InstanceNorm2d(n, track_running_stats=True)])
def test_running_statistics_are_of_values_far_from_zero(comm: Any, make: Any, dtype: torch.dtype) -> None:
    x = (normal(*SHAPE) + 30).to(dtype)
    exact, found = make(6).double(), make(6)
    exact(x.double())
    with torch.autocast("cpu", dtype) if dtype != torch.float32 else torch.enable_grad():
        dc.parallelize(found, grid_over(comm, h=comm.size))(dc.scatter(x, grid_over(comm, h=comm.size)))
    torch.testing.assert_close(found.running_mean.double(), exact.running_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.running_var.double(), exact.running_var, rtol=2e-5, atol=0)


COSTS: dict[str, Cost] = {
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
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", COSTS)
def test_bytes_that_are_sent_and_summed(comm: Any, name: str) -> None:
    check_bytes(comm, COSTS[name])


KEPT: dict[str, tuple[Callable[[Any], Any], float]] = {
    "convolution 1 x 1": (convolution(1), 1),
    "convolution 3 x 3": (convolution(3), 2.3),
    "batch norm": (normalize, 1),
    "group norm": (lambda x: F.group_norm(x, 2), 1),
    "average pooling": (lambda x: F.avg_pool2d(x, 3, 1, 1), 1.3),
    "max pooling": (lambda x: F.max_pool2d(x, 3, 1, 1), 2.3),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", KEPT)
def test_what_autograd_keeps(comm: Any, name: str) -> None:
    check_saved_tensors(comm, *KEPT[name])


@pytest.mark.ranks(2, 3)
def test_a_backward_pass_sends_what_the_forward_pass_sent_and_sums_each_weight_once(comm: Any) -> None:
    grid = grid_over(comm, h=comm.size)
    layer = dc.parallelize(nn.Conv2d(C, 3, 3, padding=1).double(), grid, broadcast=True)
    x = dc.scatter(normal(N, C, H, W), dc.Distribution(grid, (None, None, "h", None))).requires_grad_()
    y = layer(x)
    with count_traffic() as traffic:
        y.sum().backward()
    assert comm.allreduce(sum(traffic.sent.values())) == 2 * (comm.size - 1) * ROW
    weights = sum(8 * p.numel() for p in layer.parameters())
    assert 0 <= sum(traffic.reduced.values()) - weights - 8 < 400, traffic.reduced
