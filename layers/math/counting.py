"""Counts and look-ups of values.

Each rank counts in its block, and the counts are summed over ranks. Look-ups are elementwise: the values that are
searched are complete on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distconv.dispatch import implements
from distconv.errors import NoRule, NumericalError
from distconv.layers.common.alignment import aligned, as_distributed, result_shape
from distconv.layers.math.reductions import folding, summed
from distconv.process import watchdog
from distconv.tensor import DistTensor

_FLOATS = (torch.float32, torch.float64)


@implements(torch.bincount, torch.Tensor.bincount, tensors="input weights")
def bincount(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> DistTensor:
    """Compute ``torch.bincount`` as the sum of the ranks' counts. Parameters as in torch.

    Raises
    ------
    NoRule
        For a plain tensor with distributed weights, and for arguments that torch rejects.
    NumericalError
        For a negative number.
    """
    if not isinstance(input, DistTensor) or input.dim() != 1 or input.is_floating_point() or input.is_complex():
        raise NoRule("bincount of a tensor that is no distributed one of whole numbers and one dimension")
    if minlength < 0 or (weights is not None and (weights.shape != input.shape or weights.requires_grad)):
        raise NoRule("bincount with such weights or minlength")
    if input.numel() and int(input.min()) < 0:
        raise NumericalError("bincount only supports 1-d non-negative integral inputs.")
    length = max(minlength, int(input.max()) + 1 if input.numel() else 0)
    share = None if weights is None else aligned(weights, input.dist, input.shape)
    fold = folding(input, None)
    counts = summed(torch.bincount(input.local, share, length), fold)
    return as_distributed(counts, input.grid)


@implements(torch.histc, torch.Tensor.histc)
def histc(input: DistTensor, bins: int = 100, min: float = 0, max: float = 0) -> DistTensor:
    """Compute ``torch.histc`` as the sum of the ranks' histograms. Parameters as in torch.

    Raises
    ------
    NoRule
        For a dtype other than float32 and float64.
    """
    result_shape(torch.histc, input, bins, min, max)
    if input.dtype not in _FLOATS or min > max:
        raise NoRule("histc of other numbers than float32 or float64, or of an empty range")
    values: Any = input.detach()
    if min == max and input.numel():
        min, max = (float(extreme) for extreme in (values.min(), values.max()))
        if min == max:
            min, max = min - 1, max + 1
    counts = torch.histc(values.local, bins, min, max)
    return as_distributed(summed(counts, folding(input, None)), input.grid)


@implements(torch.unique, torch.Tensor.unique, passes=None)
def unique(
    input: DistTensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Compute ``torch.unique`` of all elements from the distinct elements of each rank.

    The inverse indices are distributed as the input; the other results are replicated. Parameters as in torch.

    Raises
    ------
    NoRule
        Along a dimension, and for complex numbers or NaN.
    """
    if dim is not None:
        raise NoRule("unique along a dimension: leave dim out")
    x: Any = input.detach()
    if x.is_complex() or (x.is_floating_point() and bool(x.isnan().any())):
        raise NoRule("unique of complex numbers or NaN")
    own, counts = torch.unique(x.local, return_counts=True)
    comm = input.grid.comm(input.dist.split_axes)
    with watchdog.waiting(lambda: "distinct values of all ranks"):
        everywhere = comm.allgather((own.cpu(), counts.cpu()))
    values, place = torch.unique(torch.cat([o for o, _ in everywhere]).to(own.device), return_inverse=True)
    results: list[torch.Tensor] = [as_distributed(values, input.grid)]
    if return_inverse:
        results.append(DistTensor(torch.searchsorted(values, x.local.contiguous()), input.dist, input.shape))
    if return_counts:
        total = torch.zeros_like(values, dtype=torch.int64)
        total.index_add_(0, place, torch.cat([c for _, c in everywhere]).to(own.device))
        results.append(as_distributed(total, input.grid))
    return results[0] if len(results) == 1 else tuple(results)


# -- among given values -----------------------------------------------------------------------------------------------


@implements(torch.bucketize, tensors="input boundaries")
def bucketize(
    input: torch.Tensor, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> DistTensor:
    """Compute ``torch.bucketize`` element by element. Parameters as in torch."""
    return _looked_for(partial(torch.bucketize, out_int32=out_int32, right=right), input, boundaries)


@implements(torch.searchsorted, tensors=None)
def searchsorted(sorted_sequence: torch.Tensor, input: torch.Tensor, **options: Any) -> DistTensor:
    """Compute ``torch.searchsorted`` in one sequence, element by element. Parameters as in torch.

    Raises
    ------
    NoRule
        In several sequences.
    """
    if sorted_sequence.dim() != 1 or not isinstance(input, torch.Tensor) or options.get("sorter") is not None:
        raise NoRule("searchsorted in several sequences, or with sorter=")
    return _looked_for(lambda x, sequence: torch.searchsorted(sequence, x, **options), input, sorted_sequence)


@implements(torch.isin, tensors=None)
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> DistTensor:
    """Compute ``torch.isin`` element by element. Parameters as in torch."""
    return _looked_for(partial(torch.isin, assume_unique=assume_unique, invert=invert), elements, test_elements)


def _looked_for(function: Callable[..., torch.Tensor], input: Any, values: Any) -> DistTensor:
    """Call ``function`` on each block of ``input`` and all of ``values``, which are gathered."""
    if not isinstance(input, DistTensor):
        raise NoRule("a search of what is plain in distributed values: gather them first (dc.gather(values))")
    whole = values.gather() if isinstance(values, DistTensor) else values
    return DistTensor(function(input.local.contiguous(), whole), input.dist, input.shape)
