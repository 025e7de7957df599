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
from distconv.layers.math.reductions import Dims, dtype_of, folding, numbers_in
from distconv.precision import accumulation_dtype
from distconv.tensor import DistTensor


@implements(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(input: DistTensor, dim: Dims, keepdim: bool = False) -> torch.Tensor:
    """Compute ``torch.logsumexp`` from maxima and sums over all ranks. Parameters as in torch."""
    result_shape(torch.logsumexp, input, dim, keepdim)
    fold = folding(input, dim, keepdim)
    if not fold.axes or not numbers_in(input, fold):
        return fold.wrap(torch.logsumexp(input.local, fold.dims or -1, keepdim))
    highest = (input.real if input.is_complex() else input).detach().amax(fold.dims, keepdim=True)
    highest = highest.masked_fill(highest.isinf(), 0)
    total = (input - highest).exp().sum(fold.dims, keepdim=keepdim)
    return total.log() + highest.reshape(total.shape)


def _soft(function: Any, input: DistTensor, dim: int | None, dtype: torch.dtype | None) -> torch.Tensor:
    """Compute ``torch.softmax`` or ``log_softmax``; along a split dimension ranks exchange maxima and sums only."""
    if dim is None:
        raise NoRule(f"{function.__name__} of a DistTensor without dim=: say which dimension")
    result_shape(function, input, dim, dtype=dtype)
    fold = folding(input, dim, True)
    if not fold.axes or not input.numel():
        return DistTensor(function(input.local, dim, dtype=dtype), input.dist, input.shape)
    x = input.to(dtype or dtype_of(partial(function, dim=-1), input))
    wide = x.to(accumulation_dtype(x.dtype))
    below = wide - wide.detach().amax(dim, keepdim=True)
    if function is torch.softmax:
        powers = below.exp()
        return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)
    return (below - below.exp().sum(dim, keepdim=True).log()).to(x.dtype)


def _softmax(
    function: Any, input: DistTensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Call :func:`_soft` with the arguments of ``torch.nn.functional``."""
    return _soft(function, input, dim, dtype)


def _torch_softmax(
    function: Any, input: DistTensor, dim: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Call :func:`_soft` with the arguments of ``torch``."""
    return _soft(function, input, dim, dtype)


for _name in ("softmax", "log_softmax"):
    _function = getattr(torch, _name)
    implements(getattr(F, _name))(partial(_softmax, _function))
    implements(_function, getattr(torch.Tensor, _name), getattr(torch.special, _name))(
        partial(_torch_softmax, _function)
    )
