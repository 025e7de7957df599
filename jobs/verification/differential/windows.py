"""Draws operators of windows: convolutions, poolings, interpolation, padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.differential.draw import Draw, DrawnProgram, image, on_function, on_module

_CONVOLUTIONS: dict[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

_TRANSPOSED: dict[int, Callable[..., nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}

_MAX_POOLS: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}

_AVERAGE_POOLS: dict[int, Callable[..., torch.Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _reached(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))


def _grown(draw: Draw, sizes: tuple[int, ...], padding: tuple[int, ...], reach: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes that windows of this reach fit into, except for a few that torch must reject."""
    if draw.chance(0.1):
        return sizes
    return tuple(max(size, r - 2 * p) for size, p, r in zip(sizes, padding, reach, strict=True))


def convolution(draw: Draw) -> DrawnProgram:
    """Draw an nn.Conv with padding modes, groups, and string paddings."""
    count = draw.weighted([1, 2, 3], [2, 4, 2])
    kernel = draw.numbers(count, 1, 7 if count < 3 else 4)
    dilation = draw.numbers(count, 1, 3) if draw.chance(0.4) else (1,) * count
    stride = draw.numbers(count, 1, 4) if draw.chance(0.5) else (1,) * count
    reach = _reached(kernel, dilation)
    padding: Any = tuple(draw.number(0, r) for r in reach)
    if draw.chance(0.2):
        padding = "valid" if draw.chance(0.5) else "same"
        stride = (1,) * count if padding == "same" and draw.chance(0.9) else stride
    groups = draw.number(1, 3)
    channels = groups * (1 if draw.chance(0.3) else draw.number(1, 2))
    given = channels + draw.chance(0.02)
    filters = groups * draw.number(1, 3)
    mode = draw.weighted(["zeros", "reflect", "replicate", "circular"], [7, 1, 1, 1])
    around = padding if not isinstance(padding, str) else (0,) * count if padding == "valid" else reach
    sizes = _grown(draw, draw.extents(count), around, reach)
    if mode in ("reflect", "circular") and not draw.chance(0.1):
        limits = [r if padding == "same" else p for p, r in zip(around, reach, strict=True)]
        sizes = tuple(max(size, limit + 1) for size, limit in zip(sizes, limits, strict=True))
    text = f"K{kernel} s{stride} p{padding} d{dilation} g{groups} F{filters} {mode}"
    build = partial(
        _CONVOLUTIONS[count], channels, filters, kernel, stride, padding, dilation, groups, draw.chance(0.7), mode
    )
    try:
        build()
    except ValueError:
        return convolution(draw)
    return on_module(draw, "convolution", text, build, image(draw, given, sizes))


def transposed_convolution(draw: Draw) -> DrawnProgram:
    """Draw an nn.ConvTranspose with output padding."""
    count = draw.weighted([1, 2, 3], [2, 4, 2])
    kernel = draw.numbers(count, 1, 5 if count < 3 else 3)
    dilation = draw.numbers(count, 1, 3) if draw.chance(0.3) else (1,) * count
    stride = draw.numbers(count, 1, 4)
    padding = tuple(draw.number(0, k - 1) for k in kernel)
    limits = [max(s, d) - (not draw.chance(0.05)) for s, d in zip(stride, dilation, strict=True)]
    extra = tuple(draw.number(0, limit) for limit in limits)
    groups = draw.number(1, 2)
    channels, filters = groups * draw.number(1, 2), groups * draw.number(1, 2)
    sizes = draw.numbers(count, 1, 12 if count < 3 else 6)
    build = partial(
        _TRANSPOSED[count], channels, filters, kernel, stride, padding, extra, groups, draw.chance(0.7), dilation
    )
    text = f"K{kernel} s{stride} p{padding} op{extra} d{dilation} g{groups} F{filters}"
    return on_module(draw, "transposed convolution", text, build, image(draw, channels, sizes))


def _windows(draw: Draw, count: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    kernel = draw.numbers(count, 1, 5 if count < 3 else 3)
    stride = draw.numbers(count, 1, 4) if draw.chance(0.6) else kernel
    padding = tuple(draw.number(0, k // 2 + (draw.chance(0.02))) for k in kernel) if draw.chance(0.6) else (0,) * count
    return kernel, stride, padding


def max_pool(draw: Draw) -> DrawnProgram:
    """Draw a max pooling; values with ties, sometimes indices or a NaN."""
    count = draw.weighted([1, 2, 3], [2, 4, 2])
    kernel, stride, padding = _windows(draw, count)
    dilation = draw.numbers(count, 1, 3) if draw.chance(0.3) else (1,) * count
    sizes = _grown(draw, draw.extents(count), padding, _reached(kernel, dilation))
    # For a window with padding only, torch returns an index outside the tensor, and writes a gradient there.
    sizes = tuple(max(size, d) if p else size for size, d, p in zip(sizes, dilation, padding, strict=True))
    options = {"ceil_mode": draw.chance(0.4), "return_indices": draw.chance(0.2)}
    x = image(draw, draw.number(1, 3), sizes, ties=draw.chance(0.5))
    if draw.chance(0.05):
        x.view(-1)[draw.number(0, x.numel() - 1)] = torch.nan

    def pool(given: torch.Tensor) -> Any:
        return _MAX_POOLS[count](given, kernel, stride, padding, dilation, **options)

    return on_function("max pooling", f"K{kernel} s{stride} p{padding} d{dilation} {options}", pool, x)


def average_pool(draw: Draw) -> DrawnProgram:
    """Draw an average pooling with all options that change its divisor."""
    count = draw.weighted([1, 2, 3], [2, 4, 2])
    kernel, stride, padding = _windows(draw, count)
    sizes = _grown(draw, draw.extents(count), padding, kernel)
    options: dict[str, Any] = {"ceil_mode": draw.chance(0.4), "count_include_pad": draw.chance(0.5)}
    if count > 1 and draw.chance(0.3):
        options["divisor_override"] = draw.number(1, 7)

    def pool(given: torch.Tensor) -> torch.Tensor:
        return _AVERAGE_POOLS[count](given, kernel, stride, padding, **options)

    text = f"K{kernel} s{stride} p{padding} {options}"
    return on_function("average pooling", text, pool, image(draw, draw.number(1, 3), sizes))


def interpolation(draw: Draw) -> DrawnProgram:
    """Draw an F.interpolate up or down, by size or scale factor."""
    count = draw.number(1, 3)
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[count]
    mode = draw.weighted(["nearest", linear, "nearest-exact", "area", "bicubic"], [5, 6, 1, 1, 0.5 * (count == 2)])
    options: dict[str, Any] = {"mode": mode}
    if mode in (linear, "bicubic"):
        options["align_corners"] = draw.chance(0.5)
    if draw.chance(0.5):
        options["size"] = draw.numbers(count, 1, 20 if count < 3 else 8)
    elif draw.chance(0.5):
        options["scale_factor"] = draw.pick(2, 3, 2.0, 0.5, 1.2)
    else:
        options["scale_factor"] = tuple(draw.pick(0.5, 1.0, 1.3, 1.5, 2.0, 2.6, 3.0) for _ in range(count))
        if draw.chance(0.3):
            options["recompute_scale_factor"] = draw.chance(0.5)
    sizes = draw.numbers(count, 1, 12 if count < 3 else 6)
    if mode in ("bilinear", "bicubic") and draw.chance(0.1):
        options["antialias"] = True
    x = image(draw, draw.number(1, 3), sizes)
    return on_function("interpolation", f"{options}", lambda given: F.interpolate(given, **options), x)


def padding(draw: Draw) -> DrawnProgram:
    """Draw an F.pad in its four modes; constant pads may be negative."""
    count = draw.number(1, 3)
    mode = draw.pick("constant", "reflect", "replicate", "circular")
    sizes = draw.extents(count)
    pads: list[int] = []
    for size in reversed(sizes):
        limit = {"constant": 4, "replicate": 5, "reflect": size - 1, "circular": size}[mode] + draw.chance(0.02)
        low = -(size // 2) if mode == "constant" and draw.chance(0.3) else 0
        pads += draw.numbers(2, low, max(low, min(limit, 6)))
    if mode == "constant" and draw.chance(0.3):
        pads = pads[:2]
    value = draw.pick(0.0, 1.5) if mode == "constant" else None
    x = image(draw, draw.number(1, 3), sizes)
    return on_function("pad", f"{mode} {pads} {value}", lambda given: F.pad(given, pads, mode, value), x)
