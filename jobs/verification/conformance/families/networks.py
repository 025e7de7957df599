"""Blocks of networks as users write them, frozen or unused layers, and losses and attention written by users."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from distconv.jobs.verification.conformance.families.blocks import (
    BLOCKS,
    CroppedSkip,
    Pyramid,
    batch_normed,
    convolution,
)
from distconv.jobs.verification.conformance.table import ConformanceCase, Input, Sizes, case, fixed, modules

_X = Input("N C H W")


def _frozen_first(sizes: Sizes) -> nn.Module:
    module = nn.Sequential(convolution(sizes["c"]), nn.ReLU(), convolution(sizes["c"]))
    module[0].requires_grad_(False)
    return module


def _no_grad_first(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = module.children()
    with torch.no_grad():
        x = first(x)
    return second(x)  # type: ignore[no-any-return]


def _checkpointed_and_skipped(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Recompute a block with batch norm in the backward pass: its collectives run twice."""
    return checkpoint(module, x, use_reentrant=False) + x  # type: ignore[no-any-return]


def _dice(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(x)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def _dice_per_sample(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    p = x.softmax(1)
    both = (p * t).sum((2, 3))
    return (1 - (2 * both + 1) / (p.sum((2, 3)) + t.sum((2, 3)) + 1)).mean()


def _focal(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    ce = F.cross_entropy(x, t, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def _total_variation(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :, 1:] - x[:, :, :-1]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Apply a non-local block over the pixels."""
    q, k, v = (t.flatten(2) for t in (q, k, v))
    weights = torch.softmax(torch.bmm(q.transpose(1, 2), k), -1)
    return torch.bmm(v, weights.transpose(1, 2))


def _build_with_channels(build: Callable[[int], nn.Module], sizes: Sizes) -> nn.Module:
    return build(sizes["c"])


_LEAST = {"h": 2, "w": 2}
"""Smallest spatial sizes that all blocks accept."""

_OTHER_MODULES: dict[tuple[str, str], tuple[Callable[[Sizes], nn.Module], dict[str, Any]]] = {
    ("U-Net skip", "cropped"): (
        partial(_build_with_channels, CroppedSkip),
        {"least": {"h": 6, "w": 6}, "sizes": {"h": 8}},
    ),
    ("pyramid pooling", ""): (partial(_build_with_channels, Pyramid), {}),
    ("checkpointed block", "batch norm"): (
        partial(_build_with_channels, batch_normed),
        {"function": _checkpointed_and_skipped, "least": _LEAST},
    ),
    ("frozen layer", ""): (_frozen_first, {}),
    ("layer without gradient", ""): (
        lambda sizes: nn.Sequential(convolution(sizes["c"]), convolution(sizes["c"])),
        {"function": _no_grad_first},
    ),
    ("nn.Linear", "after flatten"): (
        lambda sizes: nn.Linear(sizes["c"] * sizes["h"] * sizes["w"], 3),
        {"function": lambda module, x: module(x.flatten(1))},
    ),
    ("nn.Linear", "after global pooling"): (
        lambda sizes: nn.Linear(sizes["c"], 3),
        {"function": lambda module, x: module(F.adaptive_avg_pool2d(x, 1).flatten(1))},
    ),
    ("nn.CrossEntropyLoss", "class weights, ignore_index, label_smoothing"): (
        lambda sizes: nn.CrossEntropyLoss(torch.arange(1.0, sizes["c"] + 1), ignore_index=2, label_smoothing=0.1),
        {"labels": Input("N H W", "classes")},
    ),
}

_TARGET = fixed("N C H W", "unit")


def _modules() -> list[ConformanceCase]:
    cases = [
        one
        for name, build in BLOCKS.items()
        for one in modules(name, "", partial(_build_with_channels, build), _X, least=_LEAST)
    ]
    for (name, option), (build, attributes) in _OTHER_MODULES.items():
        attributes = dict(attributes)
        given = [attributes.pop("labels")] if "labels" in attributes else []
        cases += modules(name, option, build, _X, *given, **attributes)
    return cases


CASES: tuple[ConformanceCase, ...] = (
    *_modules(),
    case("Dice", "of the batch", _dice, _X, _TARGET),
    case("Dice", "per sample and class", _dice_per_sample, _X, _TARGET),
    case("focal loss", "pixels", _focal, _X, Input("N H W", "classes")),
    case("total variation", "", _total_variation, _X, least=_LEAST),
    case("attention", "over the pixels", _attention, _X, _X, _X),
)
