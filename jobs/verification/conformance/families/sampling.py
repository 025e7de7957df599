"""Operators whose output picks or blends positions of the input: interpolation, padding, pixel shuffling, grids."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.case import Case, Input, case, modules, plain

_DIMS = {1: "N C W", 2: "N C H W", 3: "N C D H W"}
_X = Input("N C H W")


def _resized(count: int, option: str, values: str = "normal", **options: Any) -> Case:
    return case("interpolate", option, lambda x: F.interpolate(x, **options), Input(_DIMS[count], values))


def _padded(
    option: str, pads: tuple[int, ...], mode: str = "constant", count: int = 2, least: int = 1, **options: Any
) -> Case:
    sizes = dict.fromkeys(("d", "h", "w"), least)
    return case("pad", option, lambda x: F.pad(x, pads, mode, **options), Input(_DIMS[count]), least=sizes)


CASES: tuple[Case, ...] = (
    _resized(1, "linear x2", scale_factor=2, mode="linear"),
    _resized(2, "nearest x2", scale_factor=2),
    _resized(2, "nearest x2.6", scale_factor=2.6),
    _resized(2, "nearest to (5, 13)", size=(5, 13)),
    _resized(2, "nearest-exact to (5, 13)", size=(5, 13), mode="nearest-exact"),
    _resized(2, "bilinear x2", scale_factor=2, mode="bilinear"),
    _resized(2, "bilinear x0.5", scale_factor=0.5, mode="bilinear"),
    _resized(2, "bilinear to (5, 13)", size=(5, 13), mode="bilinear"),
    _resized(2, "bilinear to (5, 13), align_corners", size=(5, 13), mode="bilinear", align_corners=True),
    _resized(2, "bilinear to (5, 13), antialias", size=(5, 13), mode="bilinear", antialias=True),
    _resized(2, "bilinear x2, infinite", "infinite", scale_factor=2, mode="bilinear"),
    _resized(2, "bilinear to (5, 13), infinite", "infinite", size=(5, 13), mode="bilinear"),
    _resized(
        2, "bilinear x3, align_corners, infinite", "infinite", scale_factor=3, mode="bilinear", align_corners=True
    ),
    _resized(2, "bicubic x2", scale_factor=2, mode="bicubic"),
    _resized(2, "area to (3, 2)", size=(3, 2), mode="area"),
    _resized(3, "trilinear x2", scale_factor=2, mode="trilinear"),
    _resized(3, "nearest to (3, 4, 5)", size=(3, 4, 5)),
    *modules("nn.Upsample", "nearest x2", lambda sizes: nn.Upsample(scale_factor=2), _X),
    *modules("nn.UpsamplingBilinear2d", "x2", lambda sizes: nn.UpsamplingBilinear2d(scale_factor=2), _X)[:1],
    _padded("constant 1 2 3 0", (1, 2, 3, 0)),
    _padded("constant, value 1.5", (2, 1, 0, 4), value=1.5),
    _padded("constant, negative", (-1, 2, -2, -1), least=4),
    _padded("constant, C and N too", (0, 1, 1, 0, 1, 0, 0, 2)),
    _padded("constant, 3-D", (1, 1, 0, 2, 2, 0), count=3),
    _padded("reflect", (2, 1, 1, 2), "reflect", least=3),
    _padded("replicate", (2, 1, 4, 2), "replicate"),
    _padded("circular", (2, 1, 1, 3), "circular", least=3),
    _padded("replicate, 1-D", (2, 3), "replicate", count=1),
    *modules("nn.ReflectionPad2d", "1", lambda sizes: nn.ReflectionPad2d(1), _X, least={"h": 2, "w": 2})[:1],
    *modules("nn.ZeroPad2d", "(1, 0, 2, 1)", lambda sizes: nn.ZeroPad2d((1, 0, 2, 1)), _X)[:1],
    case("pixel_shuffle", "x2", lambda x: F.pixel_shuffle(x, 2), _X, multiple=4),
    case("pixel_shuffle", "x3", lambda x: F.pixel_shuffle(x, 3), _X, multiple=9),
    case(
        "pixel_unshuffle",
        "/2",
        lambda x: F.pixel_unshuffle(x, 2),
        _X,
        sizes={"h": 6, "w": 10},
        least={"h": 2, "w": 2},
    ),
    *modules("nn.PixelShuffle", "x2", lambda sizes: nn.PixelShuffle(2), _X, multiple=4),
    case("channel_shuffle", "2 groups", lambda x: F.channel_shuffle(x, 2), _X, multiple=2),
    case("unfold", "K3 p1", lambda x: F.unfold(x, 3, padding=1), _X),
    case("grid_sample", "bilinear", lambda x, g: F.grid_sample(x, g, align_corners=False), _X, plain("n 4 6 2")),
    case("roll", "H by 2", lambda x: x.roll(2, 2), _X),
    case("roll", "N, C, H, W", lambda x: torch.roll(x, (1, -1, 3, 4), (0, 1, 2, 3)), _X),
    case("flip", "W", lambda x: x.flip(3), _X),
    case("flip", "N, C, H, W", lambda x: torch.flip(x, (0, 1, 2, 3)), _X),
    case("rot90", "H, W", lambda x: torch.rot90(x, 1, (2, 3)), _X),
)
