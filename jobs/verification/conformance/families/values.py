"""Other values than float64 near one: other dtypes, ties, NaN and infinity, memory that is not row-major."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.table import FEW, ConformanceCase, Input, Sizes, case, modules, plain

_X, _LABELS = Input("N C H W"), Input("N H W", "classes")
_PLAIN = plain("n c h w", dtype=torch.float32)
_SPECIAL_VALUES = ("NaN", "infinite", "negative zero")


def _block(sizes: Sizes) -> nn.Module:
    """Return a smooth network, which does not amplify round-off."""
    return nn.Sequential(nn.Conv2d(sizes["c"], 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh())


def _convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, padding=1)


def _strided(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, stride=2)


def _transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv_transpose2d(x, w, stride=2)


def _special_values(values: str) -> list[ConformanceCase]:
    # Zero times infinity is NaN, so a product that torch does not compute, such as with padding, shows here.
    x = Input("N C H W", values)
    return [
        case("conv2d", f"K3 p1, {values}", _convolved, x, plain("3 c 3 3")),
        case("conv2d", f"K2 s2, {values}", _strided, x, plain("3 c 2 2"), least={"h": 2, "w": 2}),
        case("conv2d", f"K3 p1, weight {values}", _convolved, _X, plain("3 c 3 3", values)),
        case("conv_transpose2d", f"K3 s2, {values}", _transposed, x, plain("c 3 3 3")),
        case("conv_transpose2d", f"K1 s2, weight {values}", _transposed, _X, plain("c 3 1 1", values)),
        case("relu", values, F.relu, x),
        case("interpolate", f"nearest x2, {values}", lambda x: F.interpolate(x, scale_factor=2), x),
        case("softmax", f"over C, {values}", lambda x: F.softmax(x, 1), x),
        case("mean", f"all, {values}", lambda x: x.mean(), x),
        case("cross_entropy", f"pixels, {values}", F.cross_entropy, x, _LABELS),
        case("isnan, isinf, ...", values, lambda x: tuple(getattr(x.detach(), name)() for name in _PREDICATES), x),
    ]


# Of several equal extremes, torch selects one index, or divides the gradient among all of them.
_EXTREMES: dict[tuple[str, str], Callable[[torch.Tensor], Any]] = {
    ("max", "all"): lambda x: x.max(),
    ("min", "all"): lambda x: torch.min(x),
    ("max", "C"): lambda x: x.max(1),
    ("max", "H, keepdim"): lambda x: torch.max(x, 2, keepdim=True),
    ("min", "W"): lambda x: x.min(3),
    ("amax", "all"): lambda x: x.amax(),
    ("amax", "H, W"): lambda x: x.amax((2, 3)),
    ("amin", "C, keepdim"): lambda x: torch.amin(x, 1, keepdim=True),
    ("argmax", "C"): lambda x: x.argmax(1),
    ("argmax", "all"): lambda x: x.argmax(),
    ("argmin", "W, keepdim"): lambda x: torch.argmin(x, 3, keepdim=True),
}

_ORDERING: dict[str, Callable[[torch.Tensor], Any]] = {
    "sort": lambda x: torch.sort(x, dim=2, stable=True),
    "topk": lambda x: torch.topk(x, 1, 2),
    "cummax": lambda x: torch.cummax(x, 2),
    "cumsum": lambda x: x.cumsum(2),
    "median": lambda x: torch.median(x, 2),
    "kthvalue": lambda x: torch.kthvalue(x, 1, 2),
    "maximum": lambda x: torch.maximum(x, x.flip(3)),
    "unique": lambda x: torch.unique(x.detach()),
    "mul": lambda x: x * x.round(),
}

_PREDICATES = "isnan isfinite signbit isposinf isneginf isinf nan_to_num sgn".split()


def _far_from_zero(dim: Any) -> list[ConformanceCase]:
    # A variance from sums of squares would lose twelve digits. Only the round-off of values of 1e6 is accepted.
    far = Input("N C H W", "far")
    return [
        case("mean", "far from zero", lambda x: x.mean(dim), far, condition=1e3),
        case("var", "far from zero", lambda x: x.var(dim), far, condition=1e3),
    ]


_MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "expanded": lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 7, 9),
}
"""Conversions to memory layouts that are not row-major."""

_IN_ANY_MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "flatten": lambda x: x.flatten(1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
}


def _in_memory(memory: str) -> list[ConformanceCase]:
    change = _MEMORY[memory]
    weight, least = plain("c c 3 3"), {"h": 2, "w": 2}
    return [
        case("conv2d", f"K3 p1, {memory}", lambda x, w: _convolved(change(x), w), _X, weight),
        case("conv_transpose2d", f"K3 s2, {memory}", lambda x, w: _transposed(change(x), w), _X, weight),
        *(
            case(name, memory, lambda x, function=function: function(change(x)), _X, least=least)
            for name, function in _IN_ANY_MEMORY.items()
        ),
    ]


CASES: tuple[ConformanceCase, ...] = (
    *modules("block", "float32", _block, _X, dtype=torch.float32, least={"w": 2}),
    # Three layers, each of which rounds to bfloat16.
    *modules("block", "bfloat16", _block, _X, dtype=torch.bfloat16, least={"w": 2}, condition=3.0),
    case("mean", "float32", lambda x: x.mean(), _X, dtype=torch.float32),
    case("sum", "bfloat16", lambda x: x.sum((2, 3)), _X, dtype=torch.bfloat16),
    case("sum", "float16", lambda x: x.sum((2, 3)), _X, dtype=torch.float16),
    case("cross_entropy", "pixels, float32", F.cross_entropy, _X, _LABELS, dtype=torch.float32),
    case("cross_entropy", "pixels, bfloat16", F.cross_entropy, _X, _LABELS, dtype=torch.bfloat16),
    case("sum", "whole numbers", lambda x: x.sum(1), Input("N C H W", "whole numbers")),
    case("mul", "by whole numbers", lambda a, b: a * b, _X, Input("N C H W", "whole numbers")),
    case("mul", "by plain float32", lambda a, b: a * b, _X, plain("c 1 1", dtype=torch.float32)),
    case("type_as", "of a plain tensor", lambda x, b: b.type_as(x) * x, _X, _PLAIN),
    case("to", "of a plain tensor, like a distributed one", lambda x, b: b.to(x) * x, _X, _PLAIN),
    case("to", "like a plain tensor", lambda x, b: x.to(b), _X, plain("1", dtype=torch.float32)),
    *(
        case(name, f"{option}, {values}", function, Input("N C H W", values), kinds=kinds)
        for (name, option), function in _EXTREMES.items()
        for values, kinds in (("ties", None), ("NaN", FEW))
    ),
    *(
        case(name, "H, ties", function, Input("N C H W", "ties"), least={"h": 2, "w": 1}, kinds=FEW)
        for name, function in _ORDERING.items()
    ),
    *_far_from_zero((0, 2, 3)),
    *(replace(one, kinds=FEW) for values in _SPECIAL_VALUES for one in _special_values(values)),
    *(replace(one, kinds=FEW) for memory in _MEMORY for one in _in_memory(memory)),
)
