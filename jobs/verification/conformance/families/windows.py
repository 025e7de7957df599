"""Windows that cross the edges of blocks: pooling of ties, NaN and infinities, interpolation, padding, shuffling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.table import ConformanceCase, Input, Sizes, case, modules

_DIMS = {1: "N C W", 2: "N C H W", 3: "N C D H W"}
_X = Input("N C H W")


def _windows(
    name: str, option: str, *arguments: Any, values: str = "normal", least: int = 1, **options: Any
) -> ConformanceCase:
    """Return the case of a function with windows. ``least`` is the smallest spatial size that it accepts."""
    count = int(name[-2]) if name[-2].isdigit() else 2  # max_pool3d: 3; interpolate and pad: 2
    sizes = dict.fromkeys(("d", "h", "w"), least)
    function = getattr(F, name)
    return case(name, option, lambda x: function(x, *arguments, **options), Input(_DIMS[count], values), least=sizes)


def _unpooled(x: torch.Tensor) -> Any:
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, indices, (2, 2), output_size=x.shape[2:])


_POOLS: tuple[tuple[str, str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("max_pool1d", "K3 s2 p1", (3, 2, 1), {}),
    ("max_pool2d", "K2", (2,), {"least": 2}),
    ("max_pool2d", "K3 s2 p1, ties", (3, 2, 1), {"values": "ties"}),
    ("max_pool2d", "K3 s1 p1, -inf", (3, 1, 1), {"values": "minus infinity"}),
    ("max_pool2d", "K3 s2, ceil_mode", (3, 2), {"ceil_mode": True, "least": 3}),
    ("max_pool2d", "K2 d2 s1", (2, 1), {"dilation": 2, "least": 3}),
    ("max_pool2d", "K3 s2 p1, indices, ties", (3, 2, 1), {"return_indices": True, "values": "ties"}),
    ("max_pool2d", "K3 s1 p1, indices, NaN", (3, 1, 1), {"return_indices": True, "values": "NaN"}),
    ("max_pool3d", "K3 s2 p1, indices", (3, 2, 1), {"return_indices": True}),
    ("avg_pool2d", "K3 s1 p1", (3, 1, 1), {}),
    ("avg_pool2d", "K3 s2 p1, count_include_pad=False", (3, 2, 1), {"count_include_pad": False}),
    ("avg_pool2d", "K3 s2 p1, ceil_mode", (3, 2, 1), {"ceil_mode": True}),
    ("avg_pool2d", "K3 s1 p1, infinite", (3, 1, 1), {"values": "infinite"}),
    ("avg_pool3d", "K2 s1 p1", (2, 1, 1), {}),
    ("lp_pool1d", "p=3 K2", (3.0, 2), {"values": "positive", "least": 2}),
    ("lp_pool2d", "p=2 K2", (2.0, 2), {"values": "positive", "least": 2}),
    ("lp_pool3d", "p=2 K2", (2.0, 2), {"values": "positive", "least": 2}),
    ("adaptive_avg_pool2d", "to (3, 2)", ((3, 2),), {}),
    ("adaptive_avg_pool3d", "to 1", (1,), {}),
    ("adaptive_max_pool2d", "to 1, ties", (1,), {"values": "ties"}),
    ("adaptive_max_pool2d", "to 1, indices", (1,), {"return_indices": True}),
    ("adaptive_max_pool2d", "to 3, indices", (3,), {"return_indices": True}),
    ("interpolate", "nearest x2.6", (), {"scale_factor": 2.6}),
    ("interpolate", "bilinear x2, infinite", (), {"scale_factor": 2, "mode": "bilinear", "values": "infinite"}),
    ("interpolate", "bilinear to (5, 13)", ((5, 13),), {"mode": "bilinear"}),
    ("interpolate", "bilinear to (5, 13), infinite", ((5, 13),), {"mode": "bilinear", "values": "infinite"}),
    ("interpolate", "bilinear to (5, 13), align_corners", ((5, 13),), {"mode": "bilinear", "align_corners": True}),
    ("interpolate", "bicubic x2", (), {"scale_factor": 2, "mode": "bicubic"}),
    ("pad", "constant 1 2 3 0", ((1, 2, 3, 0),), {}),
    ("pad", "constant, negative", ((-1, 2, -2, -1),), {"least": 4}),
    ("pad", "constant, C and N too", ((0, 1, 1, 0, 1, 0, 0, 2),), {}),
    ("pad", "reflect", ((2, 1, 1, 2), "reflect"), {"least": 3}),
    ("pad", "circular", ((2, 1, 1, 3), "circular"), {"least": 3}),
    ("unfold", "K3 p1", (3,), {"padding": 1}),
)
"""Function, option, arguments after x, and keywords, which include those of :func:`_windows`."""

_MODULES: dict[str, tuple[Callable[[Sizes], nn.Module], int]] = {
    "nn.Upsample": (lambda sizes: nn.Upsample(scale_factor=2), 1),
    "nn.UpsamplingBilinear2d": (lambda sizes: nn.UpsamplingBilinear2d(scale_factor=2), 1),
    "nn.PixelShuffle": (lambda sizes: nn.PixelShuffle(2), 4),
}
"""Module, and divisor of the number of channels."""

CASES: tuple[ConformanceCase, ...] = (
    *(_windows(name, option, *arguments, **options) for name, option, arguments, options in _POOLS),
    case("max_unpool2d", "K2, output_size", _unpooled, _X, least={"h": 2, "w": 2}),
    case("fold", "of unfold", lambda x: F.fold(F.unfold(x, 2), x.shape[2:], 2), _X, least={"h": 2, "w": 2}),
    *(
        one
        for name, (build, multiple) in _MODULES.items()
        for one in modules(name, "x2", build, _X, multiple=multiple)[:1]
    ),
)
