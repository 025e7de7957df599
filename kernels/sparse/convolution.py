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
        out = features.new_zeros(pairs.out_sites, weight.shape[2], dtype=_sum_dtype(features))
        for k, (inputs, outputs) in enumerate(pairs.pairs):
            if k == pairs.identity:
                out.add_(features @ weight[k])
            elif len(inputs):
                out.index_add_(0, outputs, (features.index_select(0, inputs) @ weight[k]).to(out.dtype))
        return out.to(features.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        features, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        wanted = ctx.needs_input_grad
        dx = gradient.new_zeros(features.shape, dtype=_sum_dtype(gradient)) if wanted[0] else None
        dw = weight.new_zeros(weight.shape) if wanted[1] else None
        for k, (inputs, outputs) in enumerate(ctx.pairs.pairs):
            if not len(inputs):
                continue
            everywhere = k == ctx.pairs.identity
            g = gradient if everywhere else gradient.index_select(0, outputs)
            if dw is not None:
                x = features if everywhere else features.index_select(0, inputs)
                torch.mm(x.t(), g, out=dw[k])
            if dx is not None and everywhere:
                dx.add_(g @ weight[k].t())
            elif dx is not None:
                dx.index_add_(0, inputs, (g @ weight[k].t()).to(dx.dtype))
        return None if dx is None else dx.to(features.dtype), dw, None


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return _SUMMED_IN.get(x.dtype, x.dtype)
