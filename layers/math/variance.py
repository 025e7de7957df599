"""Variances and standard deviations, computed from deviations from the mean.

So a mean that is large compared with the deviations costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distconv.dispatch import implements
from distconv.layers.common.alignment import first_result, result_shape
from distconv.layers.common.empty_blocks import run_like_other_ranks
from distconv.layers.math.reductions import accept_numpy_names, mean, plan_fold, reduced_elements
from distconv.precision import accumulation_dtype
from distconv.tensor import DistTensor


def _parse_arguments(
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Any, float, bool]:
    """Return dimensions, correction and keepdim from torch's two signatures.

    ``var(False)`` means ``unbiased=False``.
    """
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return dim, (int(unbiased) if correction is None else correction), keepdim


def _variance(input: DistTensor, dim: Any, correction: float, keepdim: bool) -> torch.Tensor:
    fold = plan_fold(input, dim, keepdim)
    count = reduced_elements(input, fold)
    if not fold.axes:
        function = partial(torch.var, dim=fold.dims or None, correction=correction, keepdim=keepdim)
        if count:
            return fold.wrap(run_like_other_ranks(function, fold.dist.local_shape(fold.shape), input.local))
        return fold.wrap(function(input.local))
    if input.is_complex():
        # The squared absolute value of the deviation is the sum of both squares.
        real, imaginary = (torch.var(t, dim, correction=correction, keepdim=keepdim) for t in (input.real, input.imag))
        return real + imaginary
    x: torch.Tensor = input.to(accumulation_dtype(input.dtype))
    if count:
        # Relative to the smallest element, so that the deviations of equal elements are exactly zero.
        x = x - x.detach().amin(fold.dims, keepdim=True)
    deviation = x - x.mean(fold.dims, keepdim=True)
    total = (deviation * deviation).sum(fold.dims, keepdim=keepdim)
    # A tensor as divisor: with too few elements torch returns NaN or infinity, where Python would raise.
    return (total / torch.tensor(float(max(0, count - correction)), dtype=total.dtype)).to(input.dtype)


def _standard_deviation(input: DistTensor, dim: Any, correction: float, keepdim: bool) -> torch.Tensor:
    variance = _variance(input, dim, correction, keepdim)
    # If the variance is 0, torch's gradient is 0, and not the infinite one of the square root.
    zero = variance == 0
    return variance.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


@accept_numpy_names
def _var_or_std(
    function: Callable[..., Any], operator: Callable[..., torch.Tensor], input: DistTensor, *args: Any, **named: Any
) -> torch.Tensor:
    """Compute ``torch.var`` or ``torch.std``."""
    result_shape(function, input, *args, **named)
    return operator(input, *_parse_arguments(*args, **named))


@accept_numpy_names
def _var_or_std_with_mean(
    function: Callable[..., Any], operator: Callable[..., torch.Tensor], input: DistTensor, *args: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``torch.var_mean`` or ``torch.std_mean``."""
    result_shape(first_result, function, input, *args, **named)
    dim, correction, keepdim = _parse_arguments(*args, **named)
    return operator(input, dim, correction, keepdim), mean(input, dim=dim, keepdim=keepdim)


for _name, _rule in (("var", _variance), ("std", _standard_deviation)):
    implements(getattr(torch, _name), getattr(torch.Tensor, _name))(partial(_var_or_std, getattr(torch, _name), _rule))
    _both = getattr(torch, f"{_name}_mean")
    implements(_both)(partial(_var_or_std_with_mean, _both, _rule))
