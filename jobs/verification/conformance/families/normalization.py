"""Normalization: batch, group, instance and layer norm, over steps that move their statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.table import ConformanceCase, Input, Sizes, case, modules, plain
from distconv.jobs.verification.engine.layouts import CHANNELS_LAST, KINDS

_DIMS = {"1d": "N C W", "3d": "N C D H W"}


def _two_steps(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the result of a second step, which moves the running statistics once more."""
    with torch.no_grad():
        module(x * 2 + 1)
    return module(x)  # type: ignore[no-any-return]


def _evaluated(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Evaluate after a training step, so that the running statistics are not their initial values."""
    with torch.no_grad():
        module(x * 2 + 1)
    return module.eval()(x)  # type: ignore[no-any-return]


def _channels_last(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


def _once(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)  # type: ignore[no-any-return]


_MODULES: dict[tuple[str, str], dict[str, Any]] = {
    ("nn.BatchNorm1d", "training"): {},
    ("nn.BatchNorm2d", "training"): {},
    ("nn.BatchNorm3d", "training"): {},
    ("nn.BatchNorm2d", "training, momentum=None"): {"momentum": None},
    ("nn.BatchNorm2d", "training, not affine"): {"affine": False},
    ("nn.BatchNorm2d", "training, no running statistics"): {"track_running_stats": False},
    ("nn.BatchNorm2d", "training, far from zero"): {"values": "far"},
    ("nn.BatchNorm2d", "evaluation"): {"steps": _evaluated},
    ("nn.GroupNorm", "2 groups"): {"groups": 2},
    ("nn.GroupNorm", "1 group"): {"groups": 1},
    ("nn.GroupNorm", "2 groups, far from zero"): {"groups": 2, "values": "far"},
    ("nn.GroupNorm", "2 groups, 3-D"): {"groups": 2, "dims": "N C D H W"},
    ("nn.InstanceNorm1d", "affine"): {"affine": True},
    ("nn.InstanceNorm2d", "plain"): {},
    ("nn.InstanceNorm2d", "affine, running statistics"): {"affine": True, "track_running_stats": True},
    ("nn.InstanceNorm2d", "evaluation, running statistics"): {"steps": _evaluated, "track_running_stats": True},
    ("nn.LayerNorm", "channels last, as in ConvNeXt"): {"steps": _channels_last},
}
"""Arguments of the module by operator and option. ``steps``, ``values`` and ``dims`` change the call and its input."""


def _module(operator: str, option: str) -> list[ConformanceCase]:
    options = dict(_MODULES[operator, option])
    groups, values = options.pop("groups", 0), options.pop("values", "normal")
    steps = options.pop("steps", _once if groups else _two_steps)
    dims = options.pop("dims", _DIMS.get(operator[-2:], "N C H W"))

    def build(sizes: Sizes) -> nn.Module:
        kind = getattr(nn, operator.removeprefix("nn."))
        module: nn.Module = kind(*([groups] if groups else []), sizes["c"], **options)
        for parameter in module.parameters():  # values other than ones and zeros
            nn.init.normal_(parameter)
        return module

    # torch rejects statistics of a single value: batch norm has all samples, instance norm only the space of one.
    least = {"nn.GroupNorm": {"h": 2, "w": 2}, "nn.LayerNorm": {}}.get(operator)
    if least is None:
        least = {"w": 2} if "Batch" in operator else dict.fromkeys("dhw", 2)
    # Round-off is relative to the mean of 1e6, not to the standard deviation of 1.
    condition = 1e3 if values == "far" else 1.0
    given = Input(dims, values)
    cases = modules(
        operator, option, build, given, function=steps, least=least, multiple=groups or 1, condition=condition
    )
    if groups and values == "far":
        # torch's kernel of group norm for channels_last subtracts squares, and loses half of the digits of such values.
        contiguous = tuple(kind for kind in KINDS if kind != CHANNELS_LAST)
        return [replace(each, kinds=each.kinds or contiguous) for each in cases]
    return cases


def _weighted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, w, None, True)


CASES: tuple[ConformanceCase, ...] = (
    *(one for operator, option in _MODULES for one in _module(operator, option)),
    case("batch_norm", "weight without bias", _weighted, Input("N C H W"), plain("c"), least={"w": 2}),
)
