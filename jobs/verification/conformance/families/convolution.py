"""Convolutions and transposed convolutions, as functions and as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.case import Case, Input, Sizes, case, fixed, modules, plain

_X = {1: Input("N C W"), 2: Input("N C H W"), 3: Input("N C D H W")}
_LETTERS = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}

_FUNCTIONS: dict[int, Callable[..., Any]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_MODULES: dict[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, Callable[..., nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}

_OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "K1": (1, {}),
    "K3 p1": (3, {"padding": 1}),
    "K3 valid": (3, {"padding": "valid"}),
    "K3 s2 p1": (3, {"padding": 1, "stride": 2}),
    "K1 s2": (1, {"stride": 2}),
    "K2 s2": (2, {"stride": 2}),
    "K4 same": (4, {"padding": "same"}),
    "K5 p2 s3": (5, {"padding": 2, "stride": 3}),
    "K3 d2 p2": (3, {"padding": 2, "dilation": 2}),
    "K2 d3 p3": (2, {"padding": 3, "dilation": 3}),
    "K3 p3 (more than the kernel needs)": (3, {"padding": 3}),
}


def _least(count: int, kernel: int, options: dict[str, Any]) -> dict[str, int]:
    padding = options.get("padding", 0)
    reach = (kernel - 1) * options.get("dilation", 1) + 1
    around = reach if padding == "same" else 0 if padding == "valid" else 2 * padding
    return dict.fromkeys(_LETTERS[count], max(1, reach - around))


def _functional(count: int, name: str) -> Case:
    kernel, options = _OPTIONS[name]
    weight = plain("6 c " + " ".join([str(kernel)] * count))
    return case(
        f"conv{count}d",
        name,
        lambda x, w, b: _FUNCTIONS[count](x, w, b, **options),
        *(_X[count], weight, plain("6")),
        least=_least(count, kernel, options),
    )


def _module(count: int, option: str, **options: Any) -> list[Case]:
    """nn.Conv; ``groups="all"`` is depthwise, ``out`` filters per channel."""
    filters = options.pop("filters", 6)

    def build(sizes: Sizes) -> nn.Module:
        depthwise = options.get("groups") == "all"
        given = {**options, "groups": sizes["c"]} if depthwise else options
        return _MODULES[count](sizes["c"], filters * sizes["c"] if depthwise else filters, **given)

    groups = options.get("groups", 1)
    least = {letter: 2 if options.get("padding_mode", "zeros") == "reflect" else 1 for letter in _LETTERS[count]}
    multiple = groups if isinstance(groups, int) else 1
    return modules(f"nn.Conv{count}d", option, build, _X[count], least=least, multiple=multiple)


def _transposed(count: int, option: str, **options: Any) -> list[Case]:
    filters = options.pop("filters", 3)
    groups = options.get("groups", 1)
    build = lambda sizes: _TRANSPOSED[count](sizes["c"], filters, **options)  # noqa: E731
    return modules(f"nn.ConvTranspose{count}d", option, build, _X[count], multiple=groups)


CASES: tuple[Case, ...] = (
    *(_functional(2, name) for name in _OPTIONS),
    *(_functional(1, name) for name in ("K3 p1", "K4 same", "K5 p2 s3")),
    *(_functional(3, name) for name in ("K3 p1", "K2 s2")),
    case(
        "conv2d",
        "dL/dx only",
        lambda x, w: F.conv2d(x, w, padding=1),
        *(_X[2], plain("6 c 3 3", grad=False)),
    ),
    case("conv2d", "dL/dw only", lambda x, w: F.conv2d(x, w, padding=1), fixed("N C H W"), plain("6 c 3 3")),
    case(
        "conv2d",
        "dL/dbias only",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        *(fixed("N C H W"), plain("6 c 3 3", grad=False), plain("6")),
    ),
    case(
        "conv2d",
        "replicated distributed weight",
        lambda x, w: F.conv2d(x, w, padding=1),
        *(_X[2], Input("6 c 3 3", layout="whole")),
    ),
    case(
        "conv2d", "twice the same weight", lambda x, w: F.conv2d(F.conv2d(x, w, padding=1), w), _X[2], plain("c c 3 3")
    ),
    *_module(1, "K7 p3", kernel_size=7, padding=3),
    *_module(2, "K3 p1", kernel_size=3, padding=1),
    *_module(2, "K3 p1, no bias", kernel_size=3, padding=1, bias=False),
    *_module(2, "K(3, 5) s(2, 1) p(1, 2)", kernel_size=(3, 5), stride=(2, 1), padding=(1, 2)),
    *_module(2, "K3 p1, 2 groups", kernel_size=3, padding=1, groups=2),
    *_module(2, "K3 p1 s2, 4 groups", kernel_size=3, padding=1, stride=2, groups=4, filters=8),
    *_module(2, "K3 p1, depthwise", kernel_size=3, padding=1, groups="all", filters=1),
    *_module(2, "K3 p1, depthwise x2", kernel_size=3, padding=1, groups="all", filters=2),
    *_module(2, "K3 p1 reflect", kernel_size=3, padding=1, padding_mode="reflect"),
    *_module(2, "K3 p1 replicate", kernel_size=3, padding=1, padding_mode="replicate"),
    *_module(2, "K3 p1 circular", kernel_size=3, padding=1, padding_mode="circular"),
    *_module(3, "K3 p1", kernel_size=3, padding=1),
    *_transposed(1, "K4 s2 p1", kernel_size=4, stride=2, padding=1),
    *_transposed(2, "K2 s2", kernel_size=2, stride=2),
    *_transposed(2, "K3 s2 p1 op1", kernel_size=3, stride=2, padding=1, output_padding=1),
    *_transposed(2, "K3", kernel_size=3),
    *_transposed(2, "K2 s3 op1 (gaps)", kernel_size=2, stride=3, output_padding=1),
    *_transposed(2, "K3 s2 d2 p2, 2 groups", kernel_size=3, stride=2, dilation=2, padding=2, groups=2, filters=4),
    *_transposed(3, "K2 s2", kernel_size=2, stride=2),
)
