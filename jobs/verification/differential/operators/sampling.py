"""Draws operators that pick or blend positions: interpolation, padding, pixel shuffling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.operators.programs import image, on_function


def interpolation(draw: Draw) -> Program:
    """F.interpolate up and down, by size or scale factor."""
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
    return on_function("interpolation", f"{options}", lambda given: F.interpolate(given, **options), x, count)


def padding(draw: Draw) -> Program:
    """F.pad in its four modes; constant pads may be negative."""
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
    return on_function("pad", f"{mode} {pads} {value}", lambda given: F.pad(given, pads, mode, value), x, count)


def pixel_shuffle(draw: Draw) -> Program:
    """Channels to space, space to channels, and channels among themselves."""
    factor, c = draw.number(1, 3), draw.number(1, 3)
    sizes = draw.numbers(2, 1, 6)
    kind = draw.pick("shuffle", "unshuffle", "channels")
    channels = c if kind == "unshuffle" else c * factor**2
    extents = (factor * sizes[0], factor * sizes[1]) if kind == "unshuffle" else sizes
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "shuffle": lambda t: F.pixel_shuffle(t, factor),
        "unshuffle": lambda t: F.pixel_unshuffle(t, factor),
        "channels": lambda t: F.channel_shuffle(t, factor),
    }
    return on_function("pixel shuffle", f"{kind} {factor}", functions[kind], image(draw, channels, extents), 2)
