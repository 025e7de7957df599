"""Where a grid has one rank the block is the whole: torch's own operator computes there, with its own backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from distconv import dispatch
from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.layers.plumbing.inplace_views import changed
from distconv.tensor import DistTensor

STOREYS = ("distconv.layers.nn.", "distconv.layers.math.", "distconv.layers.tensor.joining.")
"""Whose operators compute new values. Those of the others look at tensors, make them, or view them."""

NEVER = frozenset({"detach", "real", "imag", "conj", "data", "view_as_real", "view_as_complex"})
"""Views of their argument, which the operators keep track of."""


REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""What torch raises for arguments that it does not take; checkpoints end a second forward with another exception."""


def shortened(function: Callable[..., Any], operator: dispatch.Operator) -> dispatch.Operator:
    """``operator``, or on grids of one rank ``function`` itself; what torch refuses gets the operator's error."""

    @wraps(operator, assigned=(), updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        given: list[DistTensor] = []
        # Without a distributed first argument it is for the operator to say what the result is.
        if "out" in kwargs or not _collected(args[:1], given) or not given:
            return operator(*args, **kwargs)
        if not (_collected(args[1:], given) and _collected(kwargs.values(), given)):
            return operator(*args, **kwargs)
        local = given[0].local
        before = -1 if local.is_inference() else local._version
        try:
            y = function(*(_whole(a) for a in args), **{name: _whole(a) for name, a in kwargs.items()})
        except REFUSALS:
            return operator(*args, **kwargs)
        if y is local and (before < 0 or local._version != before):
            changed(given[0])
        return _wrapped(y, given)

    return call


def _collected(values: Any, into: list[DistTensor]) -> bool:
    """Whether all distributed tensors among ``values``, which are added to ``into``, are on grids of one rank."""
    for value in values:
        if isinstance(value, DistTensor):
            if value.dist.grid.size > 1:
                return False
            into.append(value)
        elif isinstance(value, (list, tuple)) and not _collected(value, into):
            return False
    return True


def _whole(value: Any) -> Any:
    if isinstance(value, DistTensor):
        return value.local
    if type(value) in (list, tuple):
        return type(value)(_whole(each) for each in value)
    return value


def _wrapped(y: Any, given: Sequence[DistTensor]) -> Any:
    if isinstance(y, torch.Tensor):
        for x in given:
            if y is x.local:
                return x
        dist = given[0].dist
        return DistTensor(y, dist if len(dist.axes) == y.dim() else _unsplit(dist.grid, y.dim()), y.shape)
    if isinstance(y, tuple):
        wrapped = (_wrapped(each, given) for each in y)
        return type(y)(wrapped) if hasattr(y, "n_fields") else tuple(wrapped)
    return y


def _unsplit(grid: ProcessGrid, dims: int) -> Distribution:
    return grid.cached(_made)(grid, dims)


def _made(grid: ProcessGrid, dims: int) -> Distribution:
    return Distribution(grid, (None,) * dims)


def shorten_all() -> None:
    """Do so for every registered function that computes values."""
    for function, operator in dispatch.registered().items():
        defined = getattr(getattr(operator, "func", operator), "__module__", "")
        if f"{defined}.".startswith(STOREYS) and dispatch.short_name(function) not in NEVER:
            dispatch.replace(function, shortened(function, operator))  # type: ignore[arg-type]
