"""Writing and adding to positions given by tensors of indices.

Scatter gathers the dimension of the indices. For sums, each rank adds its own values, and partial sums are
all-reduced over the ranks that share the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distconv.communication.collectives import with_grad_allreduce
from distconv.dispatch import implements, name_of
from distconv.errors import NoRule, NumericalError
from distconv.layers.common.alignment import (
    as_distributed,
    broadcast_block,
    broadcast_shape,
    common_distribution,
    redistribute_balanced,
    result_shape,
)
from distconv.layers.common.value_check import check_indices
from distconv.layers.math.pointwise import pointwise_in_place
from distconv.layers.math.reductions import plan_fold, sum_over_ranks
from distconv.layers.tensor.index_select import gather_index
from distconv.tensor import DistTensor


def _written_values(src: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the written values, a tensor or a number, from positional or keyword arguments.

    The other options stay in ``named``.
    """
    (values, *reduce) = src or [named.pop(name) for name in ("src", "value") if name in named]
    if reduce:
        (named["reduce"],) = reduce
    return values


def _scatter(
    function: Callable[..., torch.Tensor], input: torch.Tensor, dim: int, index: torch.Tensor, *src: Any, **named: Any
) -> DistTensor:
    """Compute ``torch.scatter`` or a variant; ``dim`` is gathered and split again.

    If the sizes of the operands also differ in another dimension, all dimensions are gathered.
    """
    values = _written_values(src, named)
    result_shape(function, input, dim, index, values, **named)
    dim %= max(1, input.dim())
    operands = [t for t in (input, index, values) if isinstance(t, torch.Tensor)]
    # torch permits an index that is shorter than the input. Its blocks then belong to other rows than the input's.
    extents = [[n for d, n in enumerate(t.shape) if d != dim] for t in operands]
    # With equal sizes in the other dimensions, indices refer to their own line, so other splits may stay.
    gathered_dims = [dim] if all(e == extents[0] for e in extents) else range(input.dim())
    like = next(t for t in operands if isinstance(t, DistTensor))
    x, chosen, *rest = (as_distributed(t, like.grid).redistribute(like.dist.replicate(gathered_dims)) for t in operands)
    extent = input.shape[dim] if input.dim() else 1
    # On all ranks before the kernel runs: an invalid index of one rank would otherwise raise there alone.
    check_indices(chosen.local, extent, like.grid, lambda index: IndexError(_out_of_bounds(index, dim, extent)))
    y = DistTensor(
        function(x.local, dim, chosen.local, rest[0].local if rest else values, **named), x.dist, input.shape
    )
    return y.redistribute(input.dist) if isinstance(input, DistTensor) else y


def _scatter_in_place(
    function: Callable[..., torch.Tensor], input: torch.Tensor, dim: int, index: torch.Tensor, *src: Any, **named: Any
) -> Any:
    """Compute ``Tensor.scatter_`` or a variant; values written to a plain tensor are gathered."""
    if isinstance(input, DistTensor):
        # Backward may need the previous values.
        before = input.clone() if torch.is_grad_enabled() else input
        return pointwise_in_place(torch.Tensor.copy_, input, _scatter(function, before, dim, index, *src, **named))
    values = _written_values(src, named)
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (input, values)):
        raise NoRule(
            f"{name_of(function)}_ would write a DistTensor into a plain tensor; scatter the plain tensor first "
            "(dc.scatter)"
        )
    return input.copy_(function(input, dim, gather_index(index), gather_index(values), **named))


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    _function = getattr(torch, _name)
    implements(_function, getattr(torch.Tensor, _name), tensors="input index *")(partial(_scatter, _function))
    implements(getattr(torch.Tensor, f"{_name}_"), tensors="input index *")(partial(_scatter_in_place, _function))


# -- sums -------------------------------------------------------------------------------------------------------------


def _add_sums(input: torch.Tensor, sums: DistTensor, inplace: bool) -> torch.Tensor:
    """Return ``input`` plus ``sums``, which are gathered if ``input`` is plain and changed in place."""
    if not inplace:
        return input + sums
    return input.add_(sums if isinstance(input, DistTensor) else sums.gather())


def _index_add(
    inplace: bool, input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1
) -> torch.Tensor:
    """Compute ``torch.index_add``; along a split dimension of ``source`` each rank adds its own values.

    Raises
    ------
    NoRule
        If only ``input`` is split, and for arguments that torch rejects.
    """
    result_shape(torch.index_add, input, dim, index, source)
    if not isinstance(source, DistTensor) or not input.dim() or source.dtype is not input.dtype:
        raise NoRule(
            "torch.index_add of a plain tensor to a distributed one: scatter the plain tensor first (dc.scatter)"
        )
    dim %= input.dim()
    x = redistribute_balanced(source)
    positions = broadcast_block(index, x.dist.with_axes([x.dist.axes[dim]]), index.shape)
    _check_positions(positions, input.shape[dim], dim, x)
    # Each rank fills a full range of positions along `dim`; `input` is added once, after the sum over ranks.
    fold = plan_fold(x, dim, keepdim=True)
    shape = torch.Size(input.shape[dim] if d == dim else n for d, n in enumerate(x.shape))
    blocks = x.local.new_zeros(fold.dist.local_shape(shape)).index_add(dim, positions, x.local, alpha=alpha)
    return _add_sums(input, DistTensor(sum_over_ranks(blocks, fold), fold.dist, shape), inplace)


def _index_put(
    inplace: bool, input: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Compute ``torch.index_put`` that adds one value to positions of a plain tensor, as for a confusion matrix.

    Raises
    ------
    NoRule
        For other arguments.
    """
    positions = [t for t in indices if isinstance(t, torch.Tensor)]
    counts = accumulate and len(positions) == len(indices) == input.dim() and values.numel() == 1
    if not counts or isinstance(input, DistTensor) or any(t.dtype in (torch.bool, torch.uint8) for t in positions):
        raise NoRule(
            "torch.index_put with these indices has no distributed rule: use torch.where, slices and numbers, or "
            "index_add along one dimension"
        )
    shape = broadcast_shape(tuple(t.shape for t in positions))
    dist = common_distribution(positions, shape)
    blocks = [broadcast_block(t, dist, shape) for t in positions]
    like = DistTensor(blocks[0], dist, shape)
    # One check for each dimension, on all ranks: the number of dimensions is the same everywhere.
    for dim, (position, extent) in enumerate(zip(blocks, input.shape, strict=True)):
        _check_positions(torch.where(position < 0, position + extent, position), extent, dim, like)
    value = as_distributed(values, dist.grid).replicated().local.reshape(())
    written = input.new_zeros(input.shape).index_put(
        tuple(blocks), with_grad_allreduce(value, dist.grid, dist.split_axes), accumulate=True
    )
    return _add_sums(input, as_distributed(sum_over_ranks(written, plan_fold(like, None)), dist.grid), inplace)


def _check_positions(positions: torch.Tensor, extent: int, dim: int, like: DistTensor) -> None:
    check_indices(positions, extent, like.grid, lambda index: NumericalError(_out_of_bounds(index, dim, extent)))


def _out_of_bounds(index: int, dim: int, extent: int) -> str:
    return f"index {index} is out of bounds for dimension {dim} with size {extent}"


for _name, _rule in (("index_add", _index_add), ("index_put", _index_put)):
    for _in_place, _function_name in ((False, _name), (True, f"{_name}_")):
        for _function in {getattr(h, _function_name) for h in (torch, torch.Tensor) if hasattr(h, _function_name)}:
            implements(_function, tensors="input index indices source values")(partial(_rule, _in_place))
