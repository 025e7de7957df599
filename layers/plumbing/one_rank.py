"""Where a grid has one rank the block is the whole: torch's own function computes there, with its own backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from distconv import dispatch, memory_order
from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.layers.plumbing.inplace_views import changed
from distconv.tensor import DistTensor, Strides

REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""What torch raises for arguments that it does not take; checkpoints end a second forward with another exception."""


@dispatch.register_single_rank
def own_function(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What torch's ``function`` gives; NotImplemented for what it refuses, of which the operator has its own error."""
    given: list[DistTensor] = []
    first = None if "out" in kwargs else _taken_apart(args[:1], given)
    # Without a distributed first argument it is for the operator to say what the result is.
    rest = None if first is None or not given else _taken_apart(args[1:], given)
    named = None if rest is None else _taken_apart(kwargs.values(), given)
    if first is None or rest is None or named is None:
        return NotImplemented
    local = given[0].local
    before = -1 if local.is_inference() else local._version
    try:
        y = function(*first, *rest, **dict(zip(kwargs, named, strict=True)))
    except REFUSALS:
        return NotImplemented
    if y is local and (before < 0 or local._version != before):
        changed(given[0])
    if all(map(memory_order.has_own_strides, given)):
        return _wrapped(y, given, memory_order.noncontiguous_strides)
    return memory_order.propagate_strides(function, args, kwargs, _wrapped(y, given, lambda _: None))


def _taken_apart(values: Iterable[Any], given: list[DistTensor]) -> list[Any] | None:
    """``values`` with blocks for DistTensors, which go to ``given``; None if one is on a grid of several ranks."""
    blocks: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is DistTensor:
            if value.dist.grid.size > 1:
                return None
            given.append(value)
            blocks.append(value.local)
        elif kind is list or kind is tuple:
            inner = _taken_apart(value, given)
            if inner is None:
                return None
            blocks.append(kind(inner))
        else:
            blocks.append(value)
    return blocks


def _wrapped(y: Any, given: Sequence[DistTensor], strides_of: Callable[[torch.Tensor], Strides]) -> Any:
    if isinstance(y, torch.Tensor):
        for x in given:
            if y is x._local:
                return x
        dist = given[0].dist
        dist = dist if len(dist.axes) == y.dim() else _unsplit(dist.grid, y.dim())
        return DistTensor(y, dist, y.shape, strides_of(y))
    if isinstance(y, tuple):
        wrapped = (_wrapped(each, given, strides_of) for each in y)
        return type(y)(wrapped) if hasattr(y, "n_fields") else tuple(wrapped)
    return y


def _unsplit(grid: ProcessGrid, dims: int) -> Distribution:
    return grid.cached(_made)(grid, dims)


def _made(grid: ProcessGrid, dims: int) -> Distribution:
    return Distribution(grid, (None,) * dims)
