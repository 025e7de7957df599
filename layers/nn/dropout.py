"""Dropout in training, with the mask that one process would draw, on any grid.

Every rank draws the mask of the whole tensor from torch's generator and keeps its block: the ranks' generators must
agree before (seed all ranks alike) and agree afterwards. A mask costs one byte per element of the *global* tensor for
as long as its block is being cut out, and dropout of whole channels one byte per sample and channel.

The decisions are those of ``F.dropout`` for a tensor with the same order of its elements in memory on the same device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from distconv.dispatch import StridePolicy, implements
from distconv.layers.math.pointwise import in_place, pointwise
from distconv.layers.plumbing.alignment import aligned, as_distributed, check_as_torch, result_shape
from distconv.layers.plumbing.inplace_views import changed
from distconv.layers.plumbing.random_state import agree_on_generator
from distconv.memory_order import empty_like_global
from distconv.tensor import DistTensor

_SATURATION = 1.7580993408473766
"""Minus the limit of SELU at minus infinity: what alpha dropout sets elements to, before it scales."""


def _mask(x: DistTensor, decided: int, keep: float) -> torch.Tensor:
    """True where this rank keeps an element; one decision per index of the first ``decided`` dimensions."""
    agree_on_generator(x)
    # On a GPU what is drawn depends on the dtype.
    dtype = x.dtype if x.is_cuda else torch.bool
    if decided == x.dim():
        whole = torch.empty_like(empty_like_global(x, dtype))
    else:
        whole = torch.empty([*x.shape[:decided], *(1,) * (x.dim() - decided)], dtype=dtype, device=x.device)
    return aligned(whole.bernoulli_(keep), x.dist, x.shape)


def _fused(x: DistTensor, p: float) -> torch.Tensor:
    """This rank's block after torch's fused kernel for a GPU, which draws other numbers than the steps below."""
    agree_on_generator(x)
    _, whole = torch.native_dropout(empty_like_global(x), p, True)
    y: torch.Tensor = torch.ops.aten.native_dropout_backward(x.local, aligned(whole, x.dist, x.shape), 1 / (1 - p))
    return y


def _noise(x: DistTensor, p: float, decided: int, alpha: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What this rank's block is multiplied by, and what is added, computed step by step as torch does it."""
    if p == 1:
        return x.local.new_zeros(()), None
    noise = _mask(x, decided, 1 - p).to(x.dtype)
    if not alpha:
        return noise.div_(1 - p), None
    scale = 1 / math.sqrt((_SATURATION**2 * p + 1) * (1 - p))
    added = noise.add(-1).mul_(_SATURATION * scale).add_(_SATURATION * scale * p)
    return noise.mul_(scale), added


@dataclass(frozen=True)
class _DropoutKind:
    """One of torch's dropout functions."""

    function: Callable[..., torch.Tensor]
    features: bool = False
    """True if whole channels are dropped."""
    alpha: bool = False
    """True if mean and variance are kept, as networks of SELU need it."""

    def __call__(self, input: DistTensor, p: float, training: bool, inplace: bool = False) -> DistTensor:
        """``F.dropout`` and its kin; outside training the identity."""
        result_shape(self.function, input, p, training)
        if p == 0 or not training or input.numel() == 0:
            return input
        if input.is_cuda and not (self.features or self.alpha or inplace) and p < 1:
            return DistTensor(_fused(input, p), input.dist, input.shape)
        noise, added = _noise(input, p, self._decided(input.dim()), self.alpha)
        y = input.local.mul_(noise) if inplace else input.local * noise
        if added is not None:
            y = y.add_(added)
        if not inplace:
            return DistTensor(y, input.dist, input.shape)
        changed(input)
        return input

    def _decided(self, dims: int) -> int:
        if not self.features:
            return dims
        # These two also take a sample without a sample dimension.
        return 1 if (self.function, dims) in ((F.dropout1d, 2), (F.dropout3d, 4)) else 2


def _aten(kind: _DropoutKind, inplace: bool, input: DistTensor, p: float, train: bool) -> DistTensor:
    """``torch.dropout`` and its kin."""
    return kind(input, p, train, inplace)


for _name, _features, _alpha in (
    ("dropout", False, False),
    ("dropout1d", True, False),
    ("dropout2d", True, False),
    ("dropout3d", True, False),
    ("alpha_dropout", False, True),
    ("feature_alpha_dropout", True, True),
):
    implements(getattr(F, _name))(_DropoutKind(getattr(F, _name), _features, _alpha))

for _name, _features, _alpha in (
    ("dropout", False, False),
    ("feature_dropout", True, False),
    ("alpha_dropout", False, True),
    ("feature_alpha_dropout", True, True),
):
    _kind = _DropoutKind(getattr(torch, _name), _features, _alpha)
    implements(getattr(torch, _name))(partial(_aten, _kind, False))
    implements(getattr(torch, f"{_name}_"))(partial(_aten, _kind, True))


def _rrelu(
    always: bool,
    input: DistTensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> DistTensor:
    """``F.rrelu``: in training of the whole on every rank, as numbers are drawn for the negative elements in turn."""
    if lower > upper:
        check_as_torch(F.rrelu, input, lower, upper, training)
    if not training:
        result: DistTensor = pointwise(F.leaky_relu, input, (lower + upper) / 2, inplace=inplace or always)
        return result
    agree_on_generator(input)
    whole = F.rrelu(torch.empty_like(empty_like_global(input)).copy_(input.replicated().local), lower, upper, True)
    drawn = as_distributed(whole, input.grid).redistribute(input.dist)
    return in_place(torch.Tensor.copy_, input, drawn) if inplace or always else drawn


implements(F.rrelu, torch.rrelu, order=StridePolicy.IN_TRAINING)(partial(_rrelu, False))
implements(torch.rrelu_)(partial(_rrelu, True))


@implements(torch.native_dropout)
def native_dropout(input: DistTensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.native_dropout``: what is left, and the mask."""
    factors = F.dropout(torch.ones_like(input), p, train is not False)
    return input * factors, factors != 0
