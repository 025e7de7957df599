"""Operators that look along a whole dimension: sorting, selecting by rank, cumulative sums, scattering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distconv.jobs.verification.conformance.case import FEW, Case, Input, case

_X = Input("N C H W")

_ALONG: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: torch.cumprod(x, d),
    "cummax": lambda x, d: torch.cummax(x, d),
    "cummin": lambda x, d: x.cummin(d),
    "logcumsumexp": lambda x, d: torch.logcumsumexp(x, d),
    "sort": lambda x, d: torch.sort(x, dim=d, stable=True),
    "argsort": lambda x, d: torch.argsort(x, dim=d, descending=True, stable=True),
    "topk": lambda x, d: torch.topk(x, 1, d),
    "kthvalue": lambda x, d: torch.kthvalue(x, 1, d),
    "median": lambda x, d: torch.median(x, d),
    "nanmedian": lambda x, d: x.nanmedian(d),
    "mode": lambda x, d: torch.mode(x.round(), d)[0],
    "diff": lambda x, d: torch.diff(x, dim=d),
    "flip": lambda x, d: torch.flip(x, (d,)),
    "index_select": lambda x, d: x.index_select(d, torch.zeros(3, dtype=torch.int64)),
    "gather": lambda x, d: torch.gather(x, d, torch.zeros((1, 1, 1, 1), dtype=torch.int64)),
    "scatter": lambda x, d: torch.scatter(x, d, torch.zeros((1, 1, 1, 1), dtype=torch.int64), 2.0),
    "scatter_add": lambda x, d: x.scatter_add(d, torch.zeros(x.shape, dtype=torch.int64), x * 2),
    "index_add": lambda x, d: x.index_add(d, torch.zeros(x.shape[d], dtype=torch.int64), x * 2),
    "index_fill": lambda x, d: x.index_fill(d, torch.tensor([0]), 3.0),
}
"""By dimension."""

_WHOLE: dict[tuple[str, str], Callable[[torch.Tensor], Any]] = {
    ("msort", ""): lambda x: torch.msort(x),
    ("median", "all"): lambda x: x.median(),
    ("nanmedian", "all"): lambda x: torch.nanmedian(x),
    ("unique", "of whole numbers"): lambda x: torch.unique(x.detach().round()),
    ("bincount", "of whole numbers"): lambda x: torch.bincount(x.detach().round().abs().long().flatten()),
    ("histc", ""): lambda x: torch.histc(x.detach(), 5, -2, 2),
    ("nonzero", ""): lambda x: torch.nonzero(x > 0),
    ("searchsorted", ""): lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), x.detach()),
    ("bucketize", ""): lambda x: torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)),
}

_DIMENSIONS = {"C": 1, "H": 2}

CASES: tuple[Case, ...] = (
    *(
        case(name, letter, lambda x, function=function, d=d: function(x, d), _X, least={"h": 2, "w": 1}, kinds=FEW)
        for name, function in _ALONG.items()
        for letter, d in _DIMENSIONS.items()
    ),
    *(
        case(name, "H, ties", lambda x, function=_ALONG[name]: function(x, 2), Input("N C H W", "ties"), kinds=FEW)
        for name in ("sort", "topk", "cummax", "median", "kthvalue")
    ),
    *(case(name, option, function, _X, kinds=FEW) for (name, option), function in _WHOLE.items()),
)
