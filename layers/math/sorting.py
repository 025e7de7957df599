"""Sorting, ranking and running sums, which need complete lines of a dimension.

A split dimension is made complete by an all-to-all where another dimension can be split instead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distconv.dispatch import implements
from distconv.layers.common.alignment import result_shape
from distconv.layers.common.gathered_call import called_along
from distconv.tensor import DistTensor

_DIM = {
    "sort": (0, -1),
    "argsort": (0, -1),
    "msort": (9, 0),
    "topk": (1, -1),
    "kthvalue": (1, -1),
    "mode": (0, -1),
    "median": (0, None),
    "nanmedian": (0, None),
    "cumsum": (0, None),
    "cumprod": (0, None),
    "cummax": (0, None),
    "cummin": (0, None),
    "logcumsumexp": (0, None),
}
"""Position of ``dim`` among the positional arguments of each function, and its default."""


def _ordered(function: Any, input: DistTensor, *args: Any, **named: Any) -> Any:
    """Call ``function`` on complete lines along ``dim``, split over ranks; without ``dim`` on the full tensor."""
    result_shape(_first, function, input, *args, **named)
    place, dim = _DIM[function.__name__]
    dim = named.get("dim", named.get("axis", args[place] if len(args) > place else dim))
    dims = range(input.dim()) if dim is None else [dim % max(1, input.dim())][: input.dim()]
    return called_along(function, input, dims, *args, **named)


def _first(function: Any, *args: Any, **named: Any) -> torch.Tensor:
    """Return the first result."""
    results = function(*args, **named)
    result: torch.Tensor = results if isinstance(results, torch.Tensor) else results[0]
    return result


for _name in _DIM:
    for _function in {getattr(h, _name) for h in (torch, torch.Tensor)}:
        implements(_function, passes=None)(partial(_ordered, getattr(torch, _name)))
