"""Convolutions and transposed convolutions, as functions and as modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.table import ConformanceCase, Input, Sizes, case, fixed, modules, plain

_X = {1: Input("N C W"), 2: Input("N C H W"), 3: Input("N C D H W")}
_FUNCTIONS: dict[int, Callable[..., Any]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

_OPTIONS: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "K1": (1, {}, (2,)),
    "K3 p1": (3, {"padding": 1}, (2, 1, 3)),
    "K3 valid": (3, {"padding": "valid"}, (2,)),
    "K3 s2 p1": (3, {"padding": 1, "stride": 2}, (2,)),
    "K1 s2": (1, {"stride": 2}, (2,)),
    "K2 s2": (2, {"stride": 2}, (2, 3)),
    "K4 same": (4, {"padding": "same"}, (2, 1)),
    "K5 p2 s3": (5, {"padding": 2, "stride": 3}, (2, 1)),
    "K3 d2 p2": (3, {"padding": 2, "dilation": 2}, (2,)),
    "K2 d3 p3": (2, {"padding": 3, "dilation": 3}, (2,)),
    "K3 p3 (more than the kernel needs)": (3, {"padding": 3}, (2,)),
}
"""Kernel size, options, and numbers of spatial dimensions, by the name of the case."""

_MODULES: dict[tuple[str, str], dict[str, Any]] = {
    ("nn.Conv1d", "K7 p3"): {"kernel_size": 7, "padding": 3},
    ("nn.Conv2d", "K3 p1"): {"kernel_size": 3, "padding": 1},
    ("nn.Conv2d", "K3 p1, no bias"): {"kernel_size": 3, "padding": 1, "bias": False},
    ("nn.Conv2d", "K(3, 5) s(2, 1) p(1, 2)"): {"kernel_size": (3, 5), "stride": (2, 1), "padding": (1, 2)},
    ("nn.Conv2d", "K3 p1, 2 groups"): {"kernel_size": 3, "padding": 1, "groups": 2},
    ("nn.Conv2d", "K3 p1 s2, 4 groups"): {"filters": 8, "kernel_size": 3, "padding": 1, "stride": 2, "groups": 4},
    ("nn.Conv2d", "K3 p1, depthwise"): {"filters": "c", "kernel_size": 3, "padding": 1, "groups": "c"},
    ("nn.Conv2d", "K3 p1, depthwise x2"): {"filters": "2c", "kernel_size": 3, "padding": 1, "groups": "c"},
    ("nn.Conv2d", "K3 p1 reflect"): {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    ("nn.Conv2d", "K3 p1 replicate"): {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
    ("nn.Conv2d", "K3 p1 circular"): {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    ("nn.Conv3d", "K3 p1"): {"kernel_size": 3, "padding": 1},
    ("nn.ConvTranspose1d", "K4 s2 p1"): {"filters": 3, "kernel_size": 4, "stride": 2, "padding": 1},
    ("nn.ConvTranspose2d", "K2 s2"): {"filters": 3, "kernel_size": 2, "stride": 2},
    ("nn.ConvTranspose2d", "K3 s2 p1 op1"): {
        "filters": 3, "kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1
    },
    ("nn.ConvTranspose2d", "K3"): {"filters": 3, "kernel_size": 3},
    ("nn.ConvTranspose2d", "K2 s3 op1 (gaps)"): {"filters": 3, "kernel_size": 2, "stride": 3, "output_padding": 1},
    ("nn.ConvTranspose2d", "K3 s2 d2 p2, 2 groups"): {
        "filters": 4, "kernel_size": 3, "stride": 2, "dilation": 2, "padding": 2, "groups": 2
    },
    ("nn.ConvTranspose3d", "K2 s2"): {"filters": 3, "kernel_size": 2, "stride": 2},
}  # fmt: skip
"""Arguments of the module by operator and option. ``c`` stands for the number of channels.

``filters`` (default 6) is the number of output channels.
"""


def _smallest_sizes(count: int, kernel: int, options: dict[str, Any]) -> Sizes:
    """Return the smallest spatial sizes for which the result has an element."""
    padding = options.get("padding", 0)
    covered = (kernel - 1) * options.get("dilation", 1) + 1
    padded = covered if padding == "same" else 0 if padding == "valid" else 2 * padding
    return dict.fromkeys("dhw"[3 - count :], max(1, covered - padded))


def _function_case(count: int, name: str) -> ConformanceCase:
    kernel, options, _ = _OPTIONS[name]
    given = (_X[count], plain("6 c " + " ".join([str(kernel)] * count)), plain("6"))
    function = partial(_FUNCTIONS[count], **options)
    return case(f"conv{count}d", name, function, *given, least=_smallest_sizes(count, kernel, options))


def _module_cases(operator: str, option: str) -> list[ConformanceCase]:
    options = _MODULES[operator, option]
    groups, count = options.get("groups", 1), int(operator[-2])

    def build(sizes: Sizes) -> nn.Module:
        numbers = {"c": sizes["c"], "2c": 2 * sizes["c"]}
        given = {"filters": 6} | {name: numbers.get(value, value) for name, value in options.items()}
        module: nn.Module = getattr(nn, operator.removeprefix("nn."))(sizes["c"], given.pop("filters"), **given)
        return module

    # Reflection of one row needs a second row.
    least = dict.fromkeys("dhw"[3 - count :], 2 if options.get("padding_mode") == "reflect" else 1)
    return modules(operator, option, build, _X[count], least=least, multiple=1 if groups == "c" else groups)


def _conv_p1(x: Any, w: Any, b: Any = None) -> Any:
    return F.conv2d(x, w, b, padding=1)


_FIXED_WEIGHT = plain("6 c 3 3", grad=False)

CASES: tuple[ConformanceCase, ...] = (
    *(_function_case(count, name) for name, (_, _, counts) in _OPTIONS.items() for count in counts),
    # Each requires one gradient only, so the backward pass takes a branch without the others.
    case("conv2d", "dL/dx only", _conv_p1, _X[2], _FIXED_WEIGHT),
    case("conv2d", "dL/dw only", _conv_p1, fixed("N C H W"), plain("6 c 3 3")),
    case("conv2d", "dL/dbias only", _conv_p1, fixed("N C H W"), _FIXED_WEIGHT, plain("6")),
    case("conv2d", "replicated distributed weight", _conv_p1, _X[2], Input("6 c 3 3", layout="replicated")),
    case("conv2d", "twice the same weight", lambda x, w: F.conv2d(_conv_p1(x, w), w), _X[2], plain("c c 3 3")),
    *(one for operator, option in _MODULES for one in _module_cases(operator, option)),
)
