"""Pooling: windows, adaptive and global, and its inverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from distconv.jobs.verification.conformance.case import Case, Input, case

_DIMS = {1: "N C W", 2: "N C H W", 3: "N C D H W"}
_NAMES: dict[str, Callable[..., Any]] = {
    name: getattr(F, name)
    for kind in ("max_pool", "avg_pool", "lp_pool")
    for name in (f"{kind}{d}d" for d in (1, 2, 3))
}


def _windows(name: str, option: str, *arguments: Any, values: str = "normal", least: int = 1, **options: Any) -> Case:
    """A pooling function of windows; ``least``: smallest extent that it takes."""
    count = int(name[-2])
    x = Input(_DIMS[count], values)
    sizes = dict.fromkeys(("d", "h", "w"), least)
    return case(name, option, lambda x: _NAMES[name](x, *arguments, **options), x, least=sizes)


def _adaptive(kind: str, count: int, size: Any, values: str = "normal") -> Case:
    name = f"adaptive_{kind}_pool{count}d"
    option = f"to {size}" + ("" if values == "normal" else f", {values}")
    return case(name, option, lambda x: getattr(F, name)(x, size), Input(_DIMS[count], values))


def _unpooled(x: torch.Tensor, **options: Any) -> Any:
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, indices, (2, 2), **options)


CASES: tuple[Case, ...] = (
    _windows("max_pool1d", "K3 s2 p1", 3, 2, 1),
    _windows("max_pool2d", "K2", 2, least=2),
    _windows("max_pool2d", "K3 s1 p1", 3, 1, 1),
    _windows("max_pool2d", "K3 s2 p1, ties", 3, 2, 1, values="ties"),
    _windows("max_pool2d", "K3 s1 p1, NaN", 3, 1, 1, values="NaN"),
    _windows("max_pool2d", "K3 s1 p1, -inf", 3, 1, 1, values="minus infinity"),
    _windows("max_pool2d", "K3 s2, ceil_mode", 3, 2, ceil_mode=True, least=3),
    _windows("max_pool2d", "K2 d2 s1", 2, 1, dilation=2, least=3),
    _windows("max_pool2d", "K3 s2 p1, indices", 3, 2, 1, return_indices=True),
    _windows("max_pool2d", "K3 s2 p1, indices, ties", 3, 2, 1, return_indices=True, values="ties"),
    _windows("max_pool2d", "K3 s1 p1, indices, NaN", 3, 1, 1, return_indices=True, values="NaN"),
    _windows("max_pool3d", "K2", 2, least=2),
    _windows("max_pool3d", "K3 s2 p1, indices", 3, 2, 1, return_indices=True),
    _windows("avg_pool1d", "K3 s2 p1", 3, 2, 1),
    _windows("avg_pool2d", "K2", 2, least=2),
    _windows("avg_pool2d", "K3 s1 p1", 3, 1, 1),
    _windows("avg_pool2d", "K3 s2 p1, count_include_pad=False", 3, 2, 1, count_include_pad=False),
    _windows("avg_pool2d", "K3 s2 p1, ceil_mode", 3, 2, 1, ceil_mode=True),
    _windows("avg_pool2d", "K3 s2 p1, divisor_override=4", 3, 2, 1, divisor_override=4),
    _windows("avg_pool2d", "K3 s1 p1, infinite", 3, 1, 1, values="infinite"),
    _windows("avg_pool3d", "K2 s1 p1", 2, 1, 1),
    _windows("lp_pool1d", "p=3 K2", 3.0, 2, values="positive", least=2),
    _windows("lp_pool2d", "p=2 K2", 2.0, 2, values="positive", least=2),
    _windows("lp_pool3d", "p=2 K2", 2.0, 2, values="positive", least=2),
    _adaptive("avg", 1, 1),
    _adaptive("avg", 2, 1),
    _adaptive("avg", 2, (3, 2)),
    _adaptive("avg", 2, (None, 1)),
    _adaptive("avg", 3, 1),
    _adaptive("max", 1, 1),
    _adaptive("max", 2, 1),
    _adaptive("max", 2, 1, "ties"),
    _adaptive("max", 2, (3, 2)),
    _adaptive("max", 3, 1),
    case(
        "adaptive_max_pool2d",
        "to 3, indices",
        lambda x: F.adaptive_max_pool2d(x, 3, return_indices=True),
        Input("N C H W"),
    ),
    case("max_unpool2d", "K2", _unpooled, Input("N C H W"), sizes={"h": 8, "w": 10}, least={"h": 2, "w": 2}),
    case(
        "max_unpool2d",
        "K2, output_size",
        lambda x: _unpooled(x, output_size=x.shape[2:]),
        Input("N C H W"),
        least={"h": 2, "w": 2},
    ),
    case(
        "fractional_max_pool2d",
        "K2 to 3",
        lambda x: F.fractional_max_pool2d(x, 2, 3),
        Input("N C H W"),
        least={"h": 4, "w": 4},
    ),
)
