"""Calls on a grid of one rank: torch's own function computes on the block.

The block is the full tensor there, so torch's function computes with its own backward, and the result is wrapped. The
dispatcher calls :func:`call_torch_on_blocks` instead of the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from distconv import dispatch, memory_order
from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.layers.common.inplace_views import record_inplace_change
from distconv.tensor import DistTensor, Strides

TORCH_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""Exceptions that torch raises for unsupported arguments.

``torch.utils.checkpoint`` ends a recomputation by an exception of another class, which must not be caught.
"""


@dispatch.register_single_rank
def call_torch_on_blocks(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call torch's function on blocks if all grids have one rank.

    Parameters
    ----------
    function : callable
        The function of torch that was called.
    args : tuple
        Its arguments.
    kwargs : mapping
        Its keyword arguments.

    Returns
    -------
    object
        The result with each tensor as a DistTensor. NotImplemented if a grid has more ranks, if ``out=`` is passed, if
        the first argument is not distributed, or if torch raises: then the operator runs, and raises its own error.
    """
    tensors: list[DistTensor] = []
    # The operator checks `out`: torch would resize its block, and the DistTensor would keep its old shape.
    first = None if "out" in kwargs else _unwrap(args[:1], tensors)
    # If the first argument is not distributed, the operator decides about the result.
    rest = None if first is None or not tensors else _unwrap(args[1:], tensors)
    named = None if rest is None else _unwrap(kwargs.values(), tensors)
    if first is None or rest is None or named is None:
        return NotImplemented
    local = tensors[0].local
    # Inference tensors have no version counter: any call that returns its argument counts as a change.
    before = -1 if local.is_inference() else local._version
    try:
        y = function(*first, *rest, **dict(zip(kwargs, named, strict=True)))
    except TORCH_ERRORS:
        return NotImplemented
    if y is local and (before < 0 or local._version != before):
        record_inplace_change(tensors[0])
    if all(map(memory_order.has_own_strides, tensors)):
        return _wrap(y, tensors, memory_order.noncontiguous_strides)
    return memory_order.propagate_strides(function, args, kwargs, _wrap(y, tensors, lambda _: None))


def _unwrap(values: Iterable[Any], tensors: list[DistTensor]) -> list[Any] | None:
    """Return values with each DistTensor replaced by its block, which is appended to ``tensors``.

    Return None if a grid has several ranks.
    """
    blocks: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is DistTensor:
            if value.dist.grid.size > 1:
                return None
            tensors.append(value)
            blocks.append(value.local)
        elif kind is list or kind is tuple:
            inner = _unwrap(value, tensors)
            if inner is None:
                return None
            blocks.append(kind(inner))
        else:
            blocks.append(value)
    return blocks


def _wrap(y: Any, tensors: Sequence[DistTensor], strides_of: Callable[[torch.Tensor], Strides]) -> Any:
    """Return a result with each tensor as a DistTensor, with the strides that ``strides_of`` returns."""
    if isinstance(y, torch.Tensor):
        # An in-place function returns its argument: the caller's object, and not a second one.
        for x in tensors:
            if y is x._local:
                return x
        # On one rank any distribution is right. A cached one is cheaper than a new one for each call.
        dist = tensors[0].dist
        dist = dist if len(dist.axes) == y.dim() else dist.grid.cached(_replicated_distribution)(dist.grid, y.dim())
        return DistTensor(y, dist, y.shape, strides_of(y))
    if isinstance(y, tuple):
        # Classes of torch.return_types are tuples with names.
        wrapped = (_wrap(each, tensors, strides_of) for each in y)
        return type(y)(wrapped) if hasattr(y, "n_fields") else tuple(wrapped)
    return y


def _replicated_distribution(grid: ProcessGrid, dims: int) -> Distribution:
    return Distribution(grid, (None,) * dims)
