"""Writing to positions given by a tensor of indices: scatter and scatter_add, as for one-hot labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distconv.dispatch import implements, name_of
from distconv.errors import NoRule
from distconv.layers.math.pointwise import in_place
from distconv.layers.plumbing.alignment import as_distributed, result_shape
from distconv.layers.plumbing.value_check import outside
from distconv.layers.tensor.index_select import whole_index
from distconv.tensor import DistTensor


def _written(src: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What is written, a tensor or a number, however the caller passed it; the other options stay in ``named``."""
    (values,) = src or [named.pop(name) for name in ("src", "value") if name in named]
    return values


def _scatter(
    function: Callable[..., torch.Tensor], input: torch.Tensor, dim: int, index: torch.Tensor, *src: Any, **named: Any
) -> DistTensor:
    """``torch.scatter`` or ``torch.scatter_add``; ``dim`` is gathered and split again.

    If the operands' extents differ in another dimension, too, all of them are gathered.
    """
    values = _written(src, named)
    result_shape(function, input, dim, index, values, **named)
    dim %= max(1, input.dim())
    operands = [t for t in (input, index, values) if isinstance(t, torch.Tensor)]
    extents = [[n for d, n in enumerate(t.shape) if d != dim] for t in operands]
    whole = [dim] if all(e == extents[0] for e in extents) else range(input.dim())
    like = next(t for t in operands if isinstance(t, DistTensor))
    x, chosen, *rest = (as_distributed(t, like.grid).redistribute(like.dist.replicate(whole)) for t in operands)
    extent = input.shape[dim] if input.dim() else 1
    wrong = outside(chosen.local, extent, like.grid)
    if wrong is not None:
        raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {extent}")
    y = DistTensor(
        function(x.local, dim, chosen.local, rest[0].local if rest else values, **named), x.dist, input.shape
    )
    return y.redistribute(input.dist) if isinstance(input, DistTensor) else y


def _scatter_in_place(
    function: Callable[..., torch.Tensor], input: torch.Tensor, dim: int, index: torch.Tensor, *src: Any, **named: Any
) -> Any:
    """``Tensor.scatter_``; a plain tensor counts as replicated, and what is written to it is gathered."""
    if isinstance(input, DistTensor):
        return in_place(torch.Tensor.copy_, input, _scatter(function, input, dim, index, *src, **named))
    values = _written(src, named)
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (input, values)):
        raise NoRule(
            f"{name_of(function)}_ would write a DistTensor into a plain tensor; scatter that first (dc.scatter)"
        )
    return input.copy_(function(input, dim, whole_index(index), whole_index(values), **named))


for _name in ("scatter", "scatter_add"):
    _function = getattr(torch, _name)
    implements(_function, getattr(torch.Tensor, _name))(partial(_scatter, _function))
    implements(getattr(torch.Tensor, f"{_name}_"))(partial(_scatter_in_place, _function))
