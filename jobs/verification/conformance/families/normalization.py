"""Normalization: batch, group, instance and layer norm, local response, and vectors to unit length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.case import Case, Input, Sizes, case, modules, plain

_DIMS = {1: "N C W", 2: "N C H W", 3: "N C D H W"}
_BATCH: dict[int, Callable[..., nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE: dict[int, Callable[..., nn.Module]] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def _with_parameters(module: nn.Module) -> nn.Module:
    """``module`` with other weights than ones and zeros."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def _two_steps(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The second step's result, so that running statistics matter."""
    with torch.no_grad():
        module(x * 2 + 1)
    result: torch.Tensor = module(x)
    return result


def _evaluated(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In evaluation after a step of training."""
    with torch.no_grad():
        module(x * 2 + 1)
    result: torch.Tensor = module.eval()(x)
    return result


def _batch(count: int, option: str, values: str = "normal", function: Any = _two_steps, **options: Any) -> list[Case]:
    def build(sizes: Sizes) -> nn.Module:
        return _with_parameters(_BATCH[count](sizes["c"], **options))

    x = Input(_DIMS[count], values)
    condition = 1e3 if values == "far" else 1.0
    return modules(
        f"nn.BatchNorm{count}d",
        option,
        build,
        x,
        function=function,
        least={"d": 1, "h": 1, "w": 2},
        condition=condition,
    )


def _group(groups: int, option: str, dims: str = "N C H W", **options: Any) -> list[Case]:
    values = options.pop("values", "normal")
    return modules(
        "nn.GroupNorm",
        option,
        lambda sizes: _with_parameters(nn.GroupNorm(groups, sizes["c"], **options)),
        Input(dims, values),
        condition=1e3 if values == "far" else 1.0,
        multiple=groups,
        least={"h": 2, "w": 2},
    )


def _instance(count: int, option: str, function: Any = _two_steps, **options: Any) -> list[Case]:
    return modules(
        f"nn.InstanceNorm{count}d",
        option,
        lambda sizes: _with_parameters(_INSTANCE[count](sizes["c"], **options)),
        Input(_DIMS[count]),
        function=function,
        least={"d": 2, "h": 2, "w": 2},
    )


CASES: tuple[Case, ...] = (
    *_batch(1, "training"),
    *_batch(2, "training"),
    *_batch(3, "training"),
    *_batch(2, "training, momentum=None", momentum=None),
    *_batch(2, "training, not affine", affine=False),
    *_batch(2, "training, no running statistics", track_running_stats=False),
    *_batch(2, "training, far from zero", values="far"),
    *_batch(2, "evaluation", function=_evaluated),
    case(
        "batch_norm",
        "weight without bias",
        lambda x, w: F.batch_norm(x, None, None, w, None, True),
        *(Input("N C H W"), plain("c")),
        least={"w": 2},
    ),
    *_group(2, "2 groups"),
    *_group(1, "1 group"),
    *_group(4, "4 groups"),
    *_group(2, "2 groups, not affine", affine=False),
    *_group(2, "2 groups, far from zero", values="far"),
    *_group(2, "2 groups, 3-D", "N C D H W"),
    *_instance(1, "affine", affine=True),
    *_instance(2, "plain"),
    *_instance(2, "affine, running statistics", affine=True, track_running_stats=True),
    *_instance(2, "evaluation, running statistics", function=_evaluated, track_running_stats=True),
    case(
        "layer_norm",
        "over C H W",
        lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b),
        *(Input("N C H W"), plain("c h w"), plain("c h w")),
    ),
    case("layer_norm", "over W", lambda x: F.layer_norm(x, x.shape[-1:]), Input("N C H W"), least={"w": 2}),
    *modules(
        "nn.LayerNorm",
        "channels last, as in ConvNeXt",
        lambda sizes: _with_parameters(nn.LayerNorm(sizes["c"])),
        Input("N C H W"),
        function=lambda module, x: module(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    ),
    *modules("nn.LayerNorm", "features", lambda sizes: nn.LayerNorm(sizes["c"]), Input("N C")),
    case("rms_norm", "over W", lambda x: F.rms_norm(x, x.shape[-1:]), Input("N C H W")),
    case("local_response_norm", "size 3", lambda x: F.local_response_norm(x, 3), Input("N C H W")),
    case("normalize", "over C", lambda x: F.normalize(x, dim=1), Input("N C H W")),
    case("normalize", "over W", lambda x: F.normalize(x, dim=-1), Input("N C H W")),
    case("softmax", "over C", lambda x: F.softmax(x, 1), Input("N C H W")),
    case("softmax", "over W", lambda x: F.softmax(x, -1), Input("N C H W")),
    case("softmin", "over C", lambda x: F.softmin(x, 1), Input("N C H W")),
    case("log_softmax", "over C", lambda x: F.log_softmax(x, 1), Input("N C H W")),
    case("log_softmax", "over H", lambda x: x.log_softmax(2), Input("N C H W")),
    *modules("nn.Softmax2d", "", lambda sizes: nn.Softmax2d(), Input("N C H W"))[:1],
)
