"""Convolution over a kernel map, and its gradients.

Offset by offset: gather the rows that meet, multiply them by that offset's matrix, add the products to the rows they
go to. The identity of a submanifold needs no gather. The gradients use the same pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .kernel_map import KernelMap

_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What sums over the offsets are taken in, where it is not the dtype of the features."""


def sparse_convolution(
    features: torch.Tensor, weight: torch.Tensor, pairs: KernelMap, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """out[o] = bias + the sum over offsets k and pairs (i, o) at k of features[i] @ weight[k].

    Features (N_in, C), weight (K, C, F), bias (F,), result (N_out, F). Under autocast all are cast and the result has
    the low dtype, as that of torch's convolutions; products are then summed over the offsets in float32.

    Source: Zhai et al., "SparsePipe", eq. 3.
    """
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        features, weight = features.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    out: torch.Tensor = _Convolution.apply(features, weight, pairs)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _Convolution(torch.autograd.Function):
    """Features (N_in, C), weight (K, C, F) -> (N_out, F)."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, weight: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        ctx.pairs = pairs
        ctx.save_for_backward(features, weight)
        return _multiplied(features, weight, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        features, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        back = weight.transpose(1, 2)
        dx = _multiplied(gradient, back, ctx.pairs.transposed()) if ctx.needs_input_grad[0] else None
        dw = _weight_gradient(features, gradient, ctx.pairs) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _multiplied(x: torch.Tensor, weight: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    dtype = _SUMMED_IN.get(x.dtype, x.dtype)
    if pairs.identity is None:
        out = x.new_zeros(pairs.out_sites, weight.shape[2], dtype=dtype)
    else:
        out = (x @ weight[pairs.identity]).to(dtype)
    for k, (inputs, outputs) in enumerate(pairs.pairs):
        if k != pairs.identity and len(inputs):
            out.index_add_(0, outputs, (x.index_select(0, inputs) @ weight[k]).to(dtype))
    return out.to(x.dtype)


def _weight_gradient(x: torch.Tensor, gradient: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    dw = x.new_zeros(len(pairs.pairs), x.shape[1], gradient.shape[1])
    for k, (inputs, outputs) in enumerate(pairs.pairs):
        if k == pairs.identity:
            torch.mm(x.t(), gradient, out=dw[k])
        elif len(inputs):
            torch.mm(x.index_select(0, inputs).t(), gradient.index_select(0, outputs), out=dw[k])
    return dw
