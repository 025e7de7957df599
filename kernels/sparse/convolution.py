"""Convolution over a kernel map, and its gradients.

Offset by offset the rows that meet are gathered and multiplied by that offset's matrix; the products of many offsets
are then added up site by site. The identity of a submanifold needs no gather. The gradients use the same pairs.
"""

from __future__ import annotations

from typing import Any

import torch

from distconv.derivatives import first_order

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
        return _convolved(features, weight, pairs)

    @staticmethod
    @first_order("a sparse convolution")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        features, weight = ctx.saved_tensors
        gradient, pairs = gradient.contiguous(), ctx.pairs
        dx = dw = None
        if ctx.needs_input_grad[0]:
            back = weight.transpose(1, 2)
            # Where the map is its own mirror image its groups serve both directions.
            dx = (
                _convolved(gradient, back.flip(0), pairs)
                if pairs.is_mirrored
                else _convolved(gradient, back, pairs.transposed())
            )
        if ctx.needs_input_grad[1]:
            dw = weight.new_zeros(weight.shape)
            for k, (inputs, outputs) in enumerate(pairs.pairs):
                if k == pairs.identity:
                    torch.mm(features.t(), gradient, out=dw[k])
                elif len(inputs):
                    torch.mm(features.index_select(0, inputs).t(), gradient.index_select(0, outputs), out=dw[k])
        return dx, dw, None


def _convolved(features: torch.Tensor, weight: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    """The sum over pairs of features @ weight, group after group of offsets."""
    dtype = _SUMMED_IN.get(features.dtype, features.dtype)
    out = None
    for group in pairs.groups:
        products = features.new_empty(sum(group.sizes), weight.shape[2])
        for k, rows in zip(group.offsets, products.split(group.sizes), strict=True):
            x = features if k == pairs.identity else features.index_select(0, pairs.pairs[k][0])
            torch.mm(x, weight[k], out=rows)
        summed = group.summed(products.to(dtype))
        out = summed if out is None else out.add_(summed)
    if out is None:
        return features.new_zeros(pairs.out_sites, weight.shape[2])
    return out.to(features.dtype)
