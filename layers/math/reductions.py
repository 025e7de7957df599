"""Sums, means, products and truth values over dimensions, also split ones.

Each rank reduces its block, and ranks along the axes that split the reduced dimensions combine their results. The
result is replicated over these axes. Other modules of this package use :class:`Fold` and its functions for their own
reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv.communication.collectives import allreduce_sum
from distconv.communication.transport import allreduce
from distconv.dispatch import implements
from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.layers.common.alignment import result_shape
from distconv.precision import accumulation_dtype
from distconv.tensor import DistTensor

Dims = int | list[int] | tuple[int, ...] | None
"""One dimension, several, or None for all."""

_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
"""torch's names for arguments that NumPy names differently."""

P = ParamSpec("P")
T = TypeVar("T")

_NARROW_INTEGERS = (torch.bool, torch.int8, torch.int16)
"""Dtypes that are summed in int64 across ranks."""


@dataclass(frozen=True)
class Fold:
    """A reduction: its dimensions, the grid axes that split them, and the distribution and shape of its result."""

    dims: tuple[int, ...]
    keepdim: bool
    grid: ProcessGrid
    axes: tuple[str, ...]
    """Axes that split the reduced dimensions. The ranks along them combine their results."""
    dist: Distribution
    """Distribution of the result."""
    shape: torch.Size
    """Global shape of the result."""

    def wrap(self, local: torch.Tensor) -> DistTensor:
        """Return the result whose block on this rank is ``local``."""
        return DistTensor(local, self.dist, self.shape)


def plan_fold(input: DistTensor, dim: Dims, keepdim: bool = False) -> Fold:
    """Return the reduction of a tensor over some dimensions.

    Parameters
    ----------
    input : DistTensor
    dim : int, sequence of int or None
        None, or an empty sequence, stands for all dimensions.
    keepdim : bool
        True to keep the reduced dimensions with size 1. Otherwise they are removed.

    Returns
    -------
    Fold
    """
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        dims = tuple(range(input.dim()))
    else:
        dims = tuple(sorted({d % max(input.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)}))
    # A scalar has no dimension, although torch accepts dim=0 for it.
    dims = dims[: input.dim()]
    axes = input.dist.axes
    if keepdim:
        left = [None if d in dims else a for d, a in enumerate(axes)]
        shape = torch.Size(1 if d in dims else n for d, n in enumerate(input.shape))
    else:
        left = [a for d, a in enumerate(axes) if d not in dims]
        shape = torch.Size(n for d, n in enumerate(input.shape) if d not in dims)
    reduced = input.grid.split_axes(input.dist.split[d] for d in dims)
    return Fold(dims, keepdim, input.grid, reduced, input.dist.with_axes(left), shape)


def reduced_elements(input: DistTensor, fold: Fold) -> int:
    """Return the number of elements that are reduced to one.

    Parameters
    ----------
    input : DistTensor
    fold : Fold

    Returns
    -------
    int
    """
    return math.prod(input.shape[d] for d in fold.dims)


def accept_numpy_names(operator: Callable[P, T]) -> Callable[P, T]:
    """Return an operator that also accepts NumPy's argument names ``axis`` and ``keepdims``, as torch does.

    Parameters
    ----------
    operator : callable

    Returns
    -------
    callable
    """

    @wraps(operator)
    def renamed(*args: Any, **named: Any) -> Any:
        return operator(*args, **{_NUMPY.get(name, name): value for name, value in named.items()})

    return renamed


def parse_dims(dims: tuple[Any, ...], dim: Dims, keepdim: bool) -> tuple[Dims, bool]:
    """Return ``dim`` and ``keepdim`` from positional arguments in the forms that torch accepts.

    Parameters
    ----------
    dims : tuple
        ``(dim, keepdim)``, or several dimensions; may be empty.
    dim : int, sequence of int or None
        The keyword argument, used if ``dims`` is empty.
    keepdim : bool
        The keyword argument.

    Returns
    -------
    tuple of dims and bool
    """
    if dims and isinstance(dims[-1], bool):
        *dims, keepdim = dims  # type: ignore[assignment]
    if not dims:
        return dim, keepdim
    return (dims[0] if len(dims) == 1 else tuple(dims)), keepdim


def sum_over_ranks(local: torch.Tensor, fold: Fold) -> torch.Tensor:
    """Return the sum of the ranks' partial results.

    Collective: call on every rank. Narrow integers, which MPI cannot add, are summed in int64.

    Parameters
    ----------
    local : Tensor
        This rank's partial result.
    fold : Fold

    Returns
    -------
    Tensor
        The sum, with the dtype of ``local``.
    """
    if not fold.axes:
        return local
    # MPI would add in the narrow type; torch's sums wrap around only at the end, in int64.
    if local.dtype in _NARROW_INTEGERS:
        return allreduce_sum(local.long(), fold.grid, fold.axes).to(local.dtype)
    return allreduce_sum(local, fold.grid, fold.axes)


def stack_over_ranks(partial: torch.Tensor, fold: Fold) -> torch.Tensor:
    """Return the partial results of all ranks along the axes of a reduction.

    Collective: call on every rank.

    Parameters
    ----------
    partial : Tensor
        This rank's partial result.
    fold : Fold

    Returns
    -------
    Tensor
        The results stacked along a new first dimension, in the order of ranks.
    """
    comm = fold.grid.comm(fold.axes)
    # Each rank has zeros at the positions of the other ranks, so the sum only copies.
    around = [0, 0] * partial.dim() + [comm.rank, comm.size - 1 - comm.rank]
    return allreduce_sum(F.pad(partial.unsqueeze(0), around), fold.grid, fold.axes)


def result_dtype(function: Callable[..., torch.Tensor], input: DistTensor) -> torch.dtype:
    """Return the dtype of a function's result for elements of a tensor, also under ``torch.autocast``.

    Parameters
    ----------
    function : callable
    input : DistTensor

    Returns
    -------
    torch.dtype
    """
    # The usual case needs no call.
    inexact = input.is_floating_point() or input.is_complex()
    if inexact and not torch._C._is_any_autocast_enabled():
        return input.dtype
    return function(input.local.new_zeros(1)).dtype


def _sum_over_dims(
    function: Callable[..., torch.Tensor], input: DistTensor, fold: Fold, dtype: torch.dtype
) -> torch.Tensor:
    """Sum by ``function`` in ``dtype``, or in a wider dtype if ranks add their results. Collective."""
    # Partial sums of half precision are rounded once, after the sum over ranks. torch.sum takes no empty `dim`.
    dtype = accumulation_dtype(dtype) if fold.axes else dtype
    over = (fold.dims, fold.keepdim) if fold.dims else ()
    return sum_over_ranks(function(input.local, *over, dtype=dtype), fold)


@accept_numpy_names
def _sum(
    function: Callable[..., torch.Tensor],
    input: DistTensor,
    *dims: Any,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> DistTensor:
    """Compute ``torch.sum`` or ``torch.nansum``."""
    dim, keepdim = parse_dims(dims, dim, keepdim)
    result_shape(function, input, dim, keepdim, dtype=dtype)
    fold = plan_fold(input, dim, keepdim)
    dtype = dtype or result_dtype(function, input)
    return fold.wrap(_sum_over_dims(function, input, fold, dtype).to(dtype))


sum = partial(_sum, torch.sum)
nansum = partial(_sum, torch.nansum)
implements(torch.sum, torch.Tensor.sum)(sum)
implements(torch.nansum, torch.Tensor.nansum)(nansum)


@implements(torch.mean, torch.Tensor.mean)
@accept_numpy_names
def mean(
    input: DistTensor, *dims: Any, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> DistTensor:
    """Compute ``torch.mean``: the sum divided by the global number of elements.

    Parameters
    ----------
    input, *dims, dim, keepdim, dtype
        As in ``torch.mean``.

    Returns
    -------
    DistTensor
    """
    dim, keepdim = parse_dims(dims, dim, keepdim)
    result_shape(torch.mean, input, dim, keepdim, dtype=dtype)
    fold = plan_fold(input, dim, keepdim)
    dtype = dtype or input.dtype
    # Also without axes: a sum in half precision could overflow before the division.
    # Divided by the global number of elements: a mean of means would weight uneven blocks wrongly.
    total = _sum_over_dims(torch.sum, input, fold, accumulation_dtype(dtype))
    return fold.wrap((total / reduced_elements(input, fold)).to(dtype))


@implements(torch.nanmean, torch.Tensor.nanmean)
@accept_numpy_names
def nanmean(input: DistTensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    """Compute ``torch.nanmean``: the sum divided by the global number of elements that are not NaN.

    Parameters
    ----------
    input, dim, keepdim, dtype
        As in ``torch.nanmean``.

    Returns
    -------
    Tensor
    """
    result_shape(torch.nanmean, input, dim, keepdim, dtype=dtype)
    is_number = ~input.isnan()
    return input.nansum(dim, keepdim, dtype=dtype) / is_number.sum(dim, keepdim)


@implements(torch.count_nonzero, torch.Tensor.count_nonzero)
def count_nonzero(input: DistTensor, dim: Dims = None) -> torch.Tensor:
    """Compute ``torch.count_nonzero`` as a sum.

    Parameters
    ----------
    input, dim
        As in ``torch.count_nonzero``.

    Returns
    -------
    Tensor
    """
    result_shape(torch.count_nonzero, input, dim)
    return (input != 0).sum(dim)


@implements(torch.Tensor.sum_to_size)
def sum_to_size(input: DistTensor, *size: Any) -> torch.Tensor:
    """Compute ``Tensor.sum_to_size`` as a sum.

    Parameters
    ----------
    input, *size
        As in ``Tensor.sum_to_size``.

    Returns
    -------
    Tensor
    """
    shape = result_shape(torch.Tensor.sum_to_size, input, *size)
    new = input.dim() - len(shape)
    summed = [d for d, n in enumerate(input.shape) if d < new or (shape[d - new] == 1 and n != 1)]
    return (sum(input, dim=summed, keepdim=True) if summed else input).reshape(shape)


@implements(torch.prod, torch.Tensor.prod)
@accept_numpy_names
def prod(
    input: DistTensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> DistTensor:
    """Compute ``torch.prod``: the product of the ranks' products.

    Parameters
    ----------
    input, dim, keepdim, dtype
        As in ``torch.prod``.

    Returns
    -------
    DistTensor
    """
    over = () if dim is None else (dim, keepdim)
    result_shape(torch.prod, input, *over, dtype=dtype)
    fold = plan_fold(input, dim, keepdim)
    dtype = dtype or result_dtype(torch.prod, input)
    if not fold.axes:
        return fold.wrap(torch.prod(input.local, *over, dtype=dtype))
    partial = torch.prod(input.local, *over, dtype=accumulation_dtype(dtype))
    # Partial products are gathered and multiplied in rank order, so that the gradient of a zero factor is right.
    return fold.wrap(stack_over_ranks(partial, fold).prod(0).to(dtype))


@accept_numpy_names
def _any_or_all(
    function: Callable[..., torch.Tensor],
    op: MPI.Op,
    input: DistTensor,
    *dims: Any,
    dim: Dims = None,
    keepdim: bool = False,
) -> DistTensor:
    """Compute ``torch.any`` or ``torch.all``."""
    dim, keepdim = parse_dims(dims, dim, keepdim)
    over = () if dim is None else (dim, keepdim)
    result_shape(function, input, *over)
    fold = plan_fold(input, dim, keepdim)
    local = function(input.local, *over)
    if fold.axes:
        # MPI has no type for torch's bool. As integers, MAX is "or" and MIN is "and".
        truths = local.to(torch.uint8).contiguous()
        local = allreduce(fold.grid.comm(fold.axes), truths, function.__name__, op).to(local.dtype)
    return fold.wrap(local)


for _name, _op in (("any", MPI.MAX), ("all", MPI.MIN)):
    _function = getattr(torch, _name)
    implements(_function, getattr(torch.Tensor, _name), getattr(torch, f"_is_{_name}_true"))(
        partial(_any_or_all, _function, _op)
    )
