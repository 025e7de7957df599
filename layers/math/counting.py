"""Counts and look-ups of values.

Each rank counts in its block, and the counts are summed over ranks. Look-ups are elementwise: the sequence in which
values are looked up is gathered on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distconv.dispatch import implements
from distconv.errors import NoRule, NumericalError
from distconv.layers.common.alignment import as_distributed, broadcast_block, result_shape
from distconv.layers.math.reductions import plan_fold, sum_over_ranks
from distconv.process import watchdog
from distconv.tensor import DistTensor

_FLOATS = (torch.float32, torch.float64)


@implements(torch.bincount, torch.Tensor.bincount, tensors="input weights")
def bincount(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> DistTensor:
    """Compute ``torch.bincount`` as the sum of the ranks' counts.

    Parameters
    ----------
    input, weights, minlength
        As in ``torch.bincount``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        For a plain tensor with distributed weights, and for arguments that torch rejects.
    NumericalError
        For a negative number.
    """
    if not isinstance(input, DistTensor) or input.dim() != 1 or input.is_floating_point() or input.is_complex():
        raise NoRule("torch.bincount needs a distributed tensor of integers with one dimension")
    if minlength < 0 or (weights is not None and (weights.shape != input.shape or weights.requires_grad)):
        raise NoRule("torch.bincount needs weights of the input's shape without a gradient, and minlength >= 0")
    # Extremes of all ranks, so that all of them raise, and have results of the same length to add.
    if input.numel() and int(input.min()) < 0:
        raise NumericalError("bincount only supports 1-d non-negative integral inputs.")
    length = max(minlength, int(input.max()) + 1 if input.numel() else 0)
    weight_block = None if weights is None else broadcast_block(weights, input.dist, input.shape)
    fold = plan_fold(input, None)
    counts = sum_over_ranks(torch.bincount(input.local, weight_block, length), fold)
    return as_distributed(counts, input.grid)


@implements(torch.histc, torch.Tensor.histc)
def histc(input: DistTensor, bins: int = 100, min: float = 0, max: float = 0) -> DistTensor:
    """Compute ``torch.histc`` as the sum of the ranks' histograms.

    Parameters
    ----------
    input, bins, min, max
        As in ``torch.histc``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        For a dtype other than float32 and float64.
    """
    result_shape(torch.histc, input, bins, min, max)
    if input.dtype not in _FLOATS or min > max:
        raise NoRule("torch.histc needs float32 or float64, and min <= max")
    values: Any = input.detach()
    # Equal limits stand for the extremes: those of the global tensor, so that all ranks have the same bins.
    if min == max and input.numel():
        min, max = (float(extreme) for extreme in (values.min(), values.max()))
        if min == max:
            min, max = min - 1, max + 1
    counts = torch.histc(values.local, bins, min, max)
    return as_distributed(sum_over_ranks(counts, plan_fold(input, None)), input.grid)


@implements(torch.unique, torch.Tensor.unique, passes=None)
def unique(
    input: DistTensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Compute ``torch.unique`` of all elements from the distinct elements of each rank.

    The inverse indices are distributed as the input; the other results are replicated.

    Parameters
    ----------
    input, sorted, return_inverse, return_counts, dim
        As in ``torch.unique``.

    Returns
    -------
    DistTensor or tuple of DistTensor

    Raises
    ------
    NoRule
        Along a dimension, and for complex numbers or NaN.
    """
    if dim is not None:
        raise NoRule("torch.unique along a dimension has no distributed rule: leave dim out")
    x: Any = input.detach()
    if x.is_complex() or (x.is_floating_point() and bool(x.isnan().any())):
        raise NoRule("torch.unique of complex numbers or NaN has no distributed rule")
    # 1. Distinct values of the block. 2. Gather these lists, of different lengths. 3. Merge them on every rank.
    distinct, counts = torch.unique(x.local, return_counts=True)
    comm = input.grid.comm(input.dist.split_axes)
    with watchdog.waiting(lambda: "distinct values of all ranks"):
        gathered = comm.allgather((distinct.cpu(), counts.cpu()))
    values, inverse = torch.unique(torch.cat([d for d, _ in gathered]).to(distinct.device), return_inverse=True)
    results: list[torch.Tensor] = [as_distributed(values, input.grid)]
    if return_inverse:
        results.append(DistTensor(torch.searchsorted(values, x.local.contiguous()), input.dist, input.shape))
    if return_counts:
        total = torch.zeros_like(values, dtype=torch.int64)
        total.index_add_(0, inverse, torch.cat([c for _, c in gathered]).to(distinct.device))
        results.append(as_distributed(total, input.grid))
    return results[0] if len(results) == 1 else tuple(results)


# -- among given values -----------------------------------------------------------------------------------------------


@implements(torch.bucketize, tensors="input boundaries")
def bucketize(
    input: torch.Tensor, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> DistTensor:
    """Compute ``torch.bucketize`` element by element.

    Parameters
    ----------
    input, boundaries, out_int32, right
        As in ``torch.bucketize``.

    Returns
    -------
    DistTensor
    """
    return _search_elementwise(partial(torch.bucketize, out_int32=out_int32, right=right), input, boundaries)


@implements(torch.searchsorted, tensors=None)
def searchsorted(sorted_sequence: torch.Tensor, input: torch.Tensor, **options: Any) -> DistTensor:
    """Compute ``torch.searchsorted`` in one sequence, element by element.

    Parameters
    ----------
    sorted_sequence, input, **options
        As in ``torch.searchsorted``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        In several sequences.
    """
    if sorted_sequence.dim() != 1 or not isinstance(input, torch.Tensor) or options.get("sorter") is not None:
        raise NoRule("torch.searchsorted with several sequences, or with sorter=, has no distributed rule")
    return _search_elementwise(lambda x, sequence: torch.searchsorted(sequence, x, **options), input, sorted_sequence)


@implements(torch.isin, tensors=None)
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> DistTensor:
    """Compute ``torch.isin`` element by element.

    Parameters
    ----------
    elements, test_elements, assume_unique, invert
        As in ``torch.isin``.

    Returns
    -------
    DistTensor
    """
    return _search_elementwise(partial(torch.isin, assume_unique=assume_unique, invert=invert), elements, test_elements)


def _search_elementwise(function: Callable[..., torch.Tensor], input: Any, values: Any) -> DistTensor:
    """Call ``function`` on each block of ``input`` and all of ``values``, which are gathered."""
    if not isinstance(input, DistTensor):
        raise NoRule(
            "a search for plain values in a distributed tensor has no distributed rule: gather the tensor first "
            "(dc.gather)"
        )
    searched = values.gather() if isinstance(values, DistTensor) else values
    return DistTensor(function(input.local.contiguous(), searched), input.dist, input.shape)
