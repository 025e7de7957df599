"""Softmax and logsumexp along dimensions, also split ones.

Along a split dimension ranks exchange maxima and sums only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import implements
from distconv.errors import NoRule
from distconv.layers.common.alignment import result_shape
from distconv.layers.math.reductions import Dims, plan_fold, reduced_elements, result_dtype
from distconv.precision import accumulation_dtype
from distconv.tensor import DistTensor


@implements(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(input: DistTensor, dim: Dims, keepdim: bool = False) -> torch.Tensor:
    """Compute ``torch.logsumexp`` from maxima and sums over all ranks.

    Parameters
    ----------
    input, dim, keepdim
        As in ``torch.logsumexp``.

    Returns
    -------
    Tensor
    """
    result_shape(torch.logsumexp, input, dim, keepdim)
    fold = plan_fold(input, dim, keepdim)
    if not fold.axes or not reduced_elements(input, fold):
        return fold.wrap(torch.logsumexp(input.local, fold.dims or -1, keepdim))
    # 1. The maximum over all ranks, so that no exponential overflows. It cancels, and its gradient with it: hence
    # detach. 2. The sum of exponentials, and its logarithm.
    highest = (input.real if input.is_complex() else input).detach().amax(fold.dims, keepdim=True)
    # A line of -inf only: -inf - (-inf) would be NaN, where torch gives -inf.
    highest = highest.masked_fill(highest.isinf(), 0)
    total = (input - highest).exp().sum(fold.dims, keepdim=keepdim)
    return total.log() + highest.reshape(total.shape)


def _softmax(
    function: Any, input: DistTensor, dim: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute ``torch.softmax`` or ``log_softmax``; along a split dimension ranks exchange maxima and sums only."""
    if dim is None:
        raise NoRule(f"{function.__name__} of a DistTensor without dim= has no distributed rule: pass dim")
    result_shape(function, input, dim, dtype=dtype)
    fold = plan_fold(input, dim, True)
    if not fold.axes or not input.numel():
        return DistTensor(function(input.local, dim, dtype=dtype), input.dist, input.shape)
    # Computed in the accumulation dtype, and rounded to the result's dtype only at the end, as by torch's kernels.
    x = input.to(dtype or result_dtype(partial(function, dim=-1), input))
    wide = x.to(accumulation_dtype(x.dtype))
    # The maximum over all ranks, so that no rank's exponentials overflow. The gradient through it cancels.
    below = wide - wide.detach().amax(dim, keepdim=True)
    if function is torch.softmax:
        powers = below.exp()
        return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)
    return (below - below.exp().sum(dim, keepdim=True).log()).to(x.dtype)


def _functional_softmax(
    function: Any, input: DistTensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Call :func:`_softmax` with the arguments of ``torch.nn.functional``."""
    return _softmax(function, input, dim, dtype)


for _name in ("softmax", "log_softmax"):
    _function = getattr(torch, _name)
    implements(getattr(F, _name))(partial(_functional_softmax, _function))
    implements(_function, getattr(torch.Tensor, _name), getattr(torch.special, _name))(partial(_softmax, _function))
