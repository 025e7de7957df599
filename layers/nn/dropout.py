"""Dropout with the mask of a single process.

Every rank draws the mask of the global tensor from torch's generator and keeps its block. So the ranks' generators must
be in the same state before (seed all ranks identically), and are in the same state afterwards. The mask temporarily
needs memory for each element of the *global* tensor (one byte on a CPU), or for each sample and channel if channels
are dropped.

The mask equals that of ``F.dropout`` for a tensor with the same memory order on the same device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from distconv.dispatch import StridePolicy, implements
from distconv.layers.common.alignment import as_distributed, broadcast_block, check_on_zeros, result_shape
from distconv.layers.common.inplace_views import record_inplace_change
from distconv.layers.common.random_state import check_same_generator_state
from distconv.layers.math.pointwise import pointwise, pointwise_in_place
from distconv.memory_order import empty_like_global
from distconv.tensor import DistTensor

_SATURATION = 1.7580993408473766
"""Minus the limit of SELU at minus infinity. Alpha dropout sets dropped elements to the limit before it scales."""


def _draw_mask(x: DistTensor, mask_dims: int, keep: float) -> torch.Tensor:
    """Return this rank's block of the mask. Collective.

    One number is drawn for each index of the first ``mask_dims`` dimensions.
    """
    check_same_generator_state(x)
    # On a GPU the drawn numbers depend on the dtype.
    dtype = x.dtype if x.is_cuda else torch.bool
    if mask_dims == x.dim():
        mask = torch.empty_like(empty_like_global(x, dtype))
    else:
        mask = torch.empty([*x.shape[:mask_dims], *(1,) * (x.dim() - mask_dims)], dtype=dtype, device=x.device)
    return broadcast_block(mask.bernoulli_(keep), x.dist, x.shape)


def _fused_dropout(x: DistTensor, p: float) -> torch.Tensor:
    """Return this rank's block after torch's fused GPU kernel. Collective.

    The kernel draws other numbers than :func:`_draw_mask`.
    """
    check_same_generator_state(x)
    # 1. Draw the global mask by the forward kernel; its values are not used. 2. Apply this rank's block of it by the
    # backward kernel, which multiplies by mask and scale.
    _, mask = torch.native_dropout(empty_like_global(x), p, True)
    y: torch.Tensor = torch.ops.aten.native_dropout_backward(
        x.local, broadcast_block(mask, x.dist, x.shape), 1 / (1 - p)
    )
    return y


def _scale_and_shift(x: DistTensor, p: float, mask_dims: int, alpha: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the factor of this rank's block, and the summand or None, computed by the steps of torch. Collective."""
    # As in torch, no numbers are drawn in this case.
    if p == 1:
        return x.local.new_zeros(()), None
    noise = _draw_mask(x, mask_dims, 1 - p).to(x.dtype)
    if not alpha:
        return noise.div_(1 - p), None
    scale = 1 / math.sqrt((_SATURATION**2 * p + 1) * (1 - p))
    added = noise.add(-1).mul_(_SATURATION * scale).add_(_SATURATION * scale * p)
    return noise.mul_(scale), added


@dataclass(frozen=True)
class _DropoutKind:
    """One of torch's dropout functions, as an operator."""

    function: Callable[..., torch.Tensor]
    """The function of torch, which checks the arguments."""
    features: bool = False
    """True to drop complete channels. Otherwise single elements."""
    alpha: bool = False
    """True to preserve mean and variance, for networks with SELU. Otherwise dropped elements are zero."""

    def __call__(self, input: DistTensor, p: float, training: bool, inplace: bool = False) -> DistTensor:
        """Compute dropout; outside training return the input.

        Parameters
        ----------
        input, p, training, inplace
            As in ``F.dropout``.

        Returns
        -------
        DistTensor
        """
        result_shape(self.function, input, p, training)
        if p == 0 or not training or input.numel() == 0:
            return input
        # torch's own condition for its fused kernel.
        if input.is_cuda and not (self.features or self.alpha or inplace) and p < 1:
            return DistTensor(_fused_dropout(input, p), input.dist, input.shape)
        noise, added = _scale_and_shift(input, p, self._mask_dims(input.dim()), self.alpha)
        y = input.local.mul_(noise) if inplace else input.local * noise
        if added is not None:
            y = y.add_(added)
        if not inplace:
            return DistTensor(y, input.dist, input.shape)
        record_inplace_change(input)
        return input

    def _mask_dims(self, dims: int) -> int:
        """Return the number of leading dimensions with a number per index."""
        if not self.features:
            return dims
        # These two also take a sample without a sample dimension. F.dropout2d takes three dimensions as (N, C, L).
        return 1 if (self.function, dims) in ((F.dropout1d, 2), (F.dropout3d, 4)) else 2


def _torch_dropout(kind: _DropoutKind, inplace: bool, input: DistTensor, p: float, train: bool) -> DistTensor:
    """Call the operator with the arguments of ``torch.dropout`` and its variants."""
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
    implements(getattr(torch, _name))(partial(_torch_dropout, _kind, False))
    implements(getattr(torch, f"{_name}_"))(partial(_torch_dropout, _kind, True))


def _rrelu(
    always_inplace: bool,
    input: DistTensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> DistTensor:
    """Compute ``F.rrelu``; in training on the gathered tensor, because a number is drawn for each negative element."""
    if lower > upper:
        check_on_zeros(F.rrelu, input, lower, upper, training)
    if not training:
        result: DistTensor = pointwise(F.leaky_relu, input, (lower + upper) / 2, inplace=inplace or always_inplace)
        return result
    check_same_generator_state(input)
    full = F.rrelu(torch.empty_like(empty_like_global(input)).copy_(input.replicated().local), lower, upper, True)
    drawn = as_distributed(full, input.grid).redistribute(input.dist)
    return pointwise_in_place(torch.Tensor.copy_, input, drawn) if inplace or always_inplace else drawn


implements(F.rrelu, torch.rrelu, order=StridePolicy.IN_TRAINING)(partial(_rrelu, False))
implements(torch.rrelu_)(partial(_rrelu, True))


@implements(torch.native_dropout)
def native_dropout(input: DistTensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``torch.native_dropout``: the result and the mask.

    Parameters
    ----------
    input, p, train
        As in ``torch.native_dropout``.

    Returns
    -------
    tuple[Tensor, Tensor]
    """
    factors = F.dropout(torch.ones_like(input), p, train is not False)
    return input * factors, factors != 0
