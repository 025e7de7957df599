"""Convolution over a kernel map, and its gradients.

For each offset of the kernel, the rows of its pairs are gathered and multiplied by its matrix. The products of many
offsets are then added up for each site. The identity of a submanifold needs no gather. The gradients use the same
pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distconv.autograd.derivatives import first_order_only

from .kernel_map import KernelMap

_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""dtype of sums over the offsets, if it is not that of the features."""


def sparse_convolution(
    features: torch.Tensor, weight: torch.Tensor, pairs: KernelMap, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the convolution: out[o] = bias + sum over offsets k and pairs (i, o) at k of features[i] @ weight[k].

    Under autocast all operands are cast and the result has the low dtype, as in torch's convolutions. Products are then
    summed over the offsets in float32.

    Parameters
    ----------
    features : Tensor
        Shape (N_in, C).
    weight : Tensor
        Shape (K, C, F), or (K, G, C / G, F / G) for G groups of channels, as ``groups`` of torch's convolutions.
    pairs : KernelMap
        The map, with K offsets.
    bias : Tensor, optional
        Shape (F,).

    Returns
    -------
    Tensor
        Shape (N_out, F).

    Source: Zhai et al., "SparsePipe", eq. 3.
    """
    device = features.device.type
    # As torch's autocast, which leaves float64 alone.
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        features, weight = features.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    out: torch.Tensor = _Convolution.apply(features, weight, pairs)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _Convolution(torch.autograd.Function):
    """Features (N_in, C), weight (K, C, F) or (K, G, C / G, F / G) -> (N_out, F)."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, weight: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        ctx.pairs = pairs
        ctx.save_for_backward(features, weight)
        return _convolve(features, weight, pairs)

    @staticmethod
    @first_order_only("a sparse convolution")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        features, weight = ctx.saved_tensors
        pairs: KernelMap = ctx.pairs
        # A symmetric map is its own transposed map with the offsets, and so the matrices, in reverse order. Its groups
        # are then made once.
        back, turned = (pairs, weight.flip(0)) if pairs.is_symmetric else (pairs.transposed(), weight)
        dx, dw = None, torch.zeros_like(weight) if ctx.needs_input_grad[1] else None

        def add_to_weights(k: int, rows: torch.Tensor) -> None:
            if dw is not None:
                # Row k of the reversed weights belongs to the opposite offset.
                row = len(dw) - 1 - k if back is pairs else k
                _multiply_transposed(_rows(features, back, k, side=1), rows, dw[row])

        gradient = gradient.contiguous()
        if ctx.needs_input_grad[0]:
            dx = _convolve(gradient, turned.transpose(-2, -1), back, add_to_weights)
        else:
            for k in range(len(weight)):
                add_to_weights(k, _rows(gradient, back, k))
        return dx, dw, None


def _convolve(
    features: torch.Tensor,
    weight: torch.Tensor,
    pairs: KernelMap,
    gathered: Callable[[int, torch.Tensor], None] = lambda k, rows: None,
) -> torch.Tensor:
    """Return the sum over pairs of features @ weight, one group of offsets after another.

    ``gathered`` is called with each offset and the rows of ``features`` of its pairs. So backward computes the gradient
    of the weight from rows that it has gathered anyway.
    """
    dtype, filters = (
        _SUMMED_IN.get(features.dtype, features.dtype),
        weight.shape[-1] * (weight.shape[1] if weight.ndim == 4 else 1),
    )
    out = None
    for group in pairs.groups:
        # The products of a group only: those of all offsets may not fit into memory.
        products = features.new_empty(sum(group.sizes), filters)
        for k, rows in zip(group.offsets, products.split(group.sizes), strict=True):
            x = _rows(features, pairs, k)
            _multiply(x, weight[k], rows)
            gathered(k, x)
        summed = group.sum_pairs(products.to(dtype))
        out = summed if out is None else out.add_(summed)
    if out is None:
        return features.new_zeros(pairs.out_sites, filters)
    # Rounded once, from the sum over all offsets.
    return out.to(features.dtype)


def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write x (P, C) @ weight (C, F), or the products of each group (G, C / G, F / G), to ``out`` (P, F)."""
    if weight.ndim == 2:
        torch.mm(x, weight, out=out)
    else:
        grouped = x.unflatten(1, weight.shape[:2])
        out.copy_(torch.einsum("pgc,gcf->pgf", grouped, weight).flatten(1))


def _multiply_transposed(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """Write x (P, C)^T @ y (P, F), or the products of each group, to ``out`` (C, F) or (G, C / G, F / G)."""
    if out.ndim == 2:
        torch.mm(x.t(), y, out=out)
    else:
        groups, inputs, outputs = out.shape
        out.copy_(torch.einsum("pgc,pgf->gcf", x.unflatten(1, (groups, inputs)), y.unflatten(1, (groups, outputs))))


def _rows(features: torch.Tensor, pairs: KernelMap, k: int, side: int = 0) -> torch.Tensor:
    """Return the rows of the input sites (``side`` 1: output sites) of the pairs at offset ``k``."""
    return features if k == pairs.identity else features.index_select(0, pairs.pairs[k][side])
