"""Sorting, ranking and running sums, which need complete lines of a dimension.

A split dimension is made complete by an all-to-all where another dimension can be split instead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distconv.dispatch import implements
from distconv.layers.common.alignment import first_result, result_shape
from distconv.layers.common.gathered_call import call_along_dims
from distconv.tensor import DistTensor

_DIM_ARGUMENT = {
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


def _call_on_lines(function: Any, input: DistTensor, *args: Any, **named: Any) -> Any:
    """Call ``function`` on complete lines along ``dim``, split over ranks; without ``dim`` on the full tensor."""
    result_shape(first_result, function, input, *args, **named)
    # A scalar has no dimension to gather, although torch accepts dim=0 and dim=-1 for it.
    position, dim = _DIM_ARGUMENT[function.__name__]
    dim = named.get("dim", named.get("axis", args[position] if len(args) > position else dim))
    dims = range(input.dim()) if dim is None else [dim % max(1, input.dim())][: input.dim()]
    # A line must be on one rank. Other dimensions are split instead, so that all ranks share the work.
    return call_along_dims(function, input, dims, *args, **named)


for _name in _DIM_ARGUMENT:
    for _function in {getattr(h, _name) for h in (torch, torch.Tensor)}:
        implements(_function, passes=None)(partial(_call_on_lines, getattr(torch, _name)))
