"""Reductions: sums, means, spreads, extremes and norms, over some dimensions or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distconv.jobs.verification.conformance.case import FEW, Case, Input, case

_X, _TIES, _NAN = Input("N C H W"), Input("N C H W", "ties"), Input("N C H W", "NaN")

_OVER: dict[str, dict[str, Any]] = {
    "all": {},
    "H, W": {"dim": (2, 3)},
    "C, keepdim": {"dim": 1, "keepdim": True},
    "N": {"dim": 0},
    "N, W, keepdim": {"dim": (0, -1), "keepdim": True},
}

_OF_ONE: dict[tuple[str, str], Callable[[torch.Tensor], Any]] = {
    ("sum", "dtype=float32"): lambda x: x.sum(dtype=torch.float32),
    ("sum", "of a comparison"): lambda x: (x > 0).sum((2, 3)),
    ("prod", "all"): lambda x: x.prod(),
    ("prod", "W"): lambda x: x.prod(3),
    ("norm", "2"): lambda x: x.norm(),
    ("norm", "1 over C"): lambda x: x.norm(1, 1),
    ("norm", "infinite"): lambda x: x.norm(torch.inf),
    ("vector_norm", "3 over H, W"): lambda x: torch.linalg.vector_norm(x, 3, (2, 3)),
    ("linalg.norm", "all"): lambda x: torch.linalg.norm(x.flatten()),
    ("norm", "0.5 over W, keepdim"): lambda x: torch.norm(x, 0.5, 3, keepdim=True),
    ("logsumexp", "C"): lambda x: x.logsumexp(1),
    ("logsumexp", "H, W"): lambda x: torch.logsumexp(x, (2, 3)),
    ("var_mean", "H, W"): lambda x: torch.var_mean(x, (2, 3)),
    ("std_mean", "all"): lambda x: torch.std_mean(x),
    ("var", "correction=0, C"): lambda x: x.var(1, correction=0),
    ("nansum", "all"): lambda x: x.nansum(),
    ("nanmean", "W"): lambda x: x.nanmean(3),
    ("count_nonzero", ""): lambda x: torch.count_nonzero(x > 0),
    ("median", "W"): lambda x: x.median(3),
    ("quantile", "0.3"): lambda x: x.quantile(0.3),
    ("any, all", "of a comparison"): lambda x: ((x > 1).any(), (x > -1).all(), (x > 1).any(1), (x > -9).all(3)),
    ("item", ""): lambda x: x * x.detach().mean().item(),
    ("equal", "of itself"): lambda x: x * float(torch.equal(x.detach(), x.detach())),
    ("allclose", "of itself"): lambda x: x * float(torch.allclose(x.detach(), x.detach())),
    ("aminmax", "all"): lambda x: torch.aminmax(x.detach()),
}

_EXTREMES: dict[tuple[str, str], Callable[[torch.Tensor], Any]] = {
    ("max", "all"): lambda x: x.max(),
    ("min", "all"): lambda x: torch.min(x),
    ("max", "C"): lambda x: x.max(1),
    ("max", "H, keepdim"): lambda x: torch.max(x, 2, keepdim=True),
    ("min", "W"): lambda x: x.min(3),
    ("amax", "all"): lambda x: x.amax(),
    ("amax", "H, W"): lambda x: x.amax((2, 3)),
    ("amin", "C, keepdim"): lambda x: torch.amin(x, 1, keepdim=True),
    ("argmax", "C"): lambda x: x.argmax(1),
    ("argmax", "all"): lambda x: x.argmax(),
    ("argmin", "W, keepdim"): lambda x: torch.argmin(x, 3, keepdim=True),
}


def _over(name: str, option: str) -> Case:
    return case(name, option, lambda x: getattr(x, name)(**_OVER[option]), _X)


CASES: tuple[Case, ...] = (
    *(_over(name, option) for name in ("sum", "mean") for option in _OVER),
    *(_over(name, option) for name in ("var", "std") for option in ("all", "H, W", "C, keepdim")),
    *(case(name, option, function, _X) for (name, option), function in _OF_ONE.items()),
    *(case(name, option, function, _X) for (name, option), function in _EXTREMES.items()),
    *(case(name, f"{option}, ties", function, _TIES, kinds=FEW) for (name, option), function in _EXTREMES.items()),
    *(case(name, f"{option}, NaN", function, _NAN, kinds=FEW) for (name, option), function in _EXTREMES.items()),
    case("mean", "H, W of 3-D", lambda x: x.mean((3, 4)), Input("N C D H W")),
    case("mean", "far from zero", lambda x: x.mean((0, 2, 3)), Input("N C H W", "far"), condition=1e3),
    case("var", "far from zero", lambda x: x.var((0, 2, 3)), Input("N C H W", "far"), condition=1e3),
    case("mean", "NaN", lambda x: x.mean(3), _NAN),
    case("sum", "infinite", lambda x: x.sum((0, 3)), Input("N C H W", "infinite")),
)
