"""Maxima and minima with their indices, and torch's conventions for ties.

The conventions also hold across ranks: NaN wins; ``amax`` and ``amin`` divide the gradient among equal elements; an
index is that of the first of equal elements along a dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication.collectives import apply, with_grad_allreduce
from distconv.communication.transport import allreduce
from distconv.dispatch import implements
from distconv.layers.common.alignment import check_on_zeros, first_result, result_shape
from distconv.layers.common.block_edges import owned_indices
from distconv.layers.math.pointwise import pointwise
from distconv.layers.math.reductions import Dims, Fold, accept_numpy_names, plan_fold, sum_over_ranks
from distconv.precision import accumulation_dtype
from distconv.tensor import DistTensor

_NO_INDEX = 1 << 62
"""Index on a rank without a candidate; larger than any index."""


def _allreduce_extremes(values: torch.Tensor, fold: Fold, largest: bool) -> torch.Tensor:
    """Return the extremes of the ranks' ``values``, or NaN if any rank has NaN. Collective.

    NaN is sent as a flag, because the result of MPI's MAX and MIN is not defined for NaN.
    """
    if not fold.axes:
        return values
    comm, op = fold.grid.comm(fold.axes), MPI.MAX if largest else MPI.MIN
    if not values.is_floating_point():
        return allreduce(comm, _contiguous_copy(values.long()), "extremes", op).to(values.dtype)
    # MPI cannot compare half precision. The flags join the values in one message: 1 wins in MAX, -1 in MIN.
    wide = values.to(accumulation_dtype(values.dtype))
    is_nan = wide.isnan()
    flags = is_nan.to(wide.dtype) * (1 if largest else -1)
    both = allreduce(
        comm, torch.stack([wide.masked_fill(is_nan, _neutral_element(wide, largest)), flags]), "extremes", op
    )
    return both[0].masked_fill(both[1] != 0, math.nan).to(values.dtype)


def _contiguous_copy(values: torch.Tensor) -> torch.Tensor:
    return values.clone(memory_format=torch.contiguous_format)


def _neutral_element(like: torch.Tensor, largest: bool) -> float | int:
    """Return the value that never wins: no element of this dtype is smaller (``largest``) or larger."""
    if like.is_floating_point():
        return -math.inf if largest else math.inf
    if like.dtype == torch.bool:
        return not largest
    return torch.iinfo(like.dtype).min if largest else torch.iinfo(like.dtype).max


def _block_extremes(local: torch.Tensor, dims: Sequence[int], largest: bool) -> torch.Tensor:
    """Return the extremes of the block with dimensions kept."""
    if any(local.shape[d] == 0 for d in dims):
        shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
        return torch.full(shape, _neutral_element(local, largest), dtype=local.dtype, device=local.device)
    return (torch.amax if largest else torch.amin)(local, tuple(dims), keepdim=True)


class _Extreme(torch.autograd.Function):
    """Extremes over several ranks. Equal elements, on any rank, get equal parts of the gradient.

    With ``divides_nan`` NaN elements count as equal, as in ``torch.max``. Otherwise the gradient is NaN if an extreme
    is NaN, as in ``torch.amax``.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, fold: Fold, largest: bool, divides_nan: bool) -> torch.Tensor:
        extremes = _allreduce_extremes(_block_extremes(local, fold.dims, largest), fold, largest)
        ctx.fold, ctx.equal = fold, _equal_or_nan if divides_nan else torch.eq
        ctx.save_for_backward(local, extremes)
        return extremes

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # 1. Count equal elements on all ranks. 2. Divide the gradient among them.
        local, extremes = ctx.saved_tensors
        equal = ctx.equal(local, extremes)
        count = equal.sum(ctx.fold.dims, keepdim=True).contiguous()
        allreduce(ctx.fold.grid.comm(ctx.fold.axes), count, "ties of extremes")
        # For second derivatives: ranks along these axes use the same gradient for different elements.
        grad = with_grad_allreduce(grad, ctx.fold.grid, ctx.fold.axes)
        return grad / count.to(grad.dtype) * equal, None, None, None


@accept_numpy_names
def _amax_or_amin(function: Any, largest: bool, input: DistTensor, dim: Dims = (), keepdim: bool = False) -> DistTensor:
    """Compute ``torch.amax`` or ``amin``."""
    result_shape(function, input, dim, keepdim)
    fold = plan_fold(input, dim, keepdim)
    if not fold.axes:
        return fold.wrap(function(input.local, dim, keepdim))
    extremes = apply(_Extreme, input.local, fold, largest, False)
    return fold.wrap(extremes.reshape(fold.dist.local_shape(fold.shape)))


amax = partial(_amax_or_amin, torch.amax, True)
amin = partial(_amax_or_amin, torch.amin, False)
implements(torch.amax, torch.Tensor.amax)(amax)
implements(torch.amin, torch.Tensor.amin)(amin)


@implements(torch.aminmax, torch.Tensor.aminmax)
def aminmax(input: DistTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Compute ``torch.aminmax`` by two reductions.

    Parameters
    ----------
    input, dim, keepdim
        As in ``torch.aminmax``.

    Returns
    -------
    torch.return_types.aminmax
        Two DistTensors, ``min`` and ``max``.
    """
    dims = () if dim is None else dim
    return torch.return_types.aminmax((amin(input, dims, keepdim), amax(input, dims, keepdim)))


# -- with the index ---------------------------------------------------------------------------------------------------


def _extremes_along_dim(
    function: Any, largest: bool, input: DistTensor, dim: int, keepdim: bool
) -> tuple[DistTensor, DistTensor]:
    """Return extremes along ``dim`` and the first global index of each. Collective.

    The gradient of an extreme goes to the element of that index.
    """
    fold = plan_fold(input, dim, keepdim)
    if not fold.axes:
        values, index = function(input.local, dim, keepdim)
        return fold.wrap(values), fold.wrap(index)
    (at,) = fold.dims
    local = input.local
    if local.shape[at]:
        best, local_index = function(local.detach(), at, True)
        candidate = owned_indices(input, at)[local_index]
    else:
        # An element that no output takes. It connects this rank to the graph.
        best = _block_extremes(local, (at,), largest).detach()
        local_index = torch.zeros(best.shape, dtype=torch.int64, device=local.device)
        candidate = local_index + _NO_INDEX
        local = torch.cat([local, local.new_zeros(best.shape)], at)
    # 1. The extreme of all ranks. 2. The smallest global index among the ranks that have it. 3. The value again, from
    # the rank of that index, through the graph: a sum in which all other ranks have zero.
    extreme = _allreduce_extremes(best, fold, largest)
    candidate = candidate.masked_fill(~_equal_or_nan(best, extreme), _NO_INDEX)
    index = allreduce(fold.grid.comm(fold.axes), _contiguous_copy(candidate), "first index of extremes", MPI.MIN)
    chosen = torch.where(candidate == index, local.gather(at, local_index), torch.zeros((), dtype=local.dtype))
    shape = fold.dist.local_shape(fold.shape)
    return fold.wrap(sum_over_ranks(chosen, fold).reshape(shape)), fold.wrap(index.reshape(shape))


def _equal_or_nan(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


@accept_numpy_names
def _max_or_min(function: Any, other: Any, largest: bool, input: torch.Tensor, *args: Any, **named: Any) -> Any:
    """Compute ``torch.max`` or ``min``: of all elements, along a dimension with indices, or of two tensors."""
    operands = [*args, *named.values()]
    if operands and isinstance(operands[0], torch.Tensor):
        return pointwise(other, input, operands[0])
    assert isinstance(input, DistTensor)
    if not operands:
        result_shape(function, input)
        fold = plan_fold(input, None)
        if not fold.axes:
            return fold.wrap(function(input.local))
        # True: unlike amax, torch.max divides the gradient among NaN elements.
        return fold.wrap(apply(_Extreme, input.local, fold, largest, True).reshape(()))
    dim, keepdim = _dim_and_keepdim(*args, **named)
    result_shape(first_result, function, input, dim, keepdim)
    return getattr(torch.return_types, function.__name__)(_extremes_along_dim(function, largest, input, dim, keepdim))


def _dim_and_keepdim(dim: int, keepdim: bool = False) -> tuple[int, bool]:
    return dim, keepdim


def _optional_dim(dim: int | None = None, keepdim: bool = False) -> tuple[int | None, bool]:
    return dim, keepdim


@accept_numpy_names
def _argmax_or_argmin(
    function: Any, find: Any, largest: bool, input: DistTensor, *args: Any, **named: Any
) -> DistTensor:
    """Compute ``torch.argmax`` or ``argmin``: the first of equal elements; without ``dim`` the flat index."""
    result_shape(function, input, *args, **named)
    # torch has no kernel for bool, but its meta implementation accepts it.
    if input.dtype == torch.bool:
        check_on_zeros(function, input)
    dim, keepdim = _optional_dim(*args, **named)
    local = input.local.detach()
    if dim is not None:
        return _extremes_along_dim(find, largest, DistTensor(local, input.dist, input.shape), dim, keepdim)[1]
    fold = plan_fold(input, None, keepdim)
    index = torch.full((1,), _NO_INDEX, device=input.device)
    best = _block_extremes(local, fold.dims, largest).reshape(1)
    # A later rank's block may hold an earlier element of the global tensor, so ranks compare flat global indices.
    if local.numel():
        flat = function(local)
        index = torch.zeros_like(index)
        for dim, local_index in enumerate(torch.unravel_index(flat, local.shape)):
            index = index * input.shape[dim] + owned_indices(input, dim)[local_index]
    if fold.axes:
        extreme = _allreduce_extremes(best, fold, largest)
        index = index.masked_fill(~_equal_or_nan(best, extreme), _NO_INDEX)
        allreduce(fold.grid.comm(fold.axes), index, "first index of extremes", MPI.MIN)
    return fold.wrap(index.reshape(fold.shape))


for _name, _largest, _other in (("max", True, torch.maximum), ("min", False, torch.minimum)):
    _find = getattr(torch, _name)
    for _function in (_find, getattr(torch.Tensor, _name)):
        implements(_function, tensors=None)(partial(_max_or_min, _find, _other, _largest))
    _argument = getattr(torch, f"arg{_name}")
    for _function in (_argument, getattr(torch.Tensor, f"arg{_name}")):
        implements(_function)(partial(_argmax_or_argmin, _argument, _find, _largest))
