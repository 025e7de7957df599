"""Scaled dot-product attention, split over samples, heads and queries.

Keys and values are gathered: each query needs all of them. Causal attention also gathers queries, and grouped-query
attention gathers heads, because torch's function needs their global indices.

Importing this module also patches ``nn.TransformerEncoder``, so that padded positions of a distributed result are zero
where torch's fast path in a single process returns zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.dispatch import OperatorKind, implements
from distconv.errors import NoRule
from distconv.layers.common.alignment import result_shape
from distconv.layers.common.empty_blocks import run_like_other_ranks
from distconv.layers.common.random_state import check_same_generator_state
from distconv.layers.math.matmul import batch_labels, contract
from distconv.process import patches
from distconv.tensor import DistTensor


@implements(F.scaled_dot_product_attention, tensors="query key value attn_mask", passes=None)
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> DistTensor:
    """Compute ``F.scaled_dot_product_attention`` with gathered keys; samples, heads and queries stay split.

    With ``is_causal=True`` queries are gathered, too, and with ``enable_gqa=True`` heads.

    Parameters
    ----------
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        As in ``F.scaled_dot_product_attention``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        With dropout on a GPU.
    """
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    shape = result_shape(F.scaled_dot_product_attention, query, key, value, attn_mask, dropout_p, **options)
    operands, labels = (
        [query, key, value],
        [[*batch_labels(t, 2), *names] for t, names in ((query, "le"), (key, "se"), (value, "sf"))],
    )
    # Labels: l for queries, s for keys, e and f for features of keys and of values. "batch 1" stands for heads.
    # Softmax needs all keys, and products all features. The causal mask counts from the first query, and grouped
    # heads are repeated in order.
    unsplit = ["s", "e", *(["l"] if is_causal else []), *(["batch 1"] if enable_gqa else [])]
    if attn_mask is not None:
        operands.append(attn_mask)
        labels.append([*batch_labels(attn_mask, 2), "l", "s"])

    batch_names = max((names[:-2] for names in labels), key=len)
    function: Callable[..., torch.Tensor] = partial(F.scaled_dot_product_attention, **options)
    if dropout_p:
        function = partial(_attention_with_dropout, dropout_p, attn_mask is not None, **options)
        operands.append(_dropout_mask(operands, (*shape[:-1], key.shape[-2]), dropout_p))
        labels.append([*batch_names, "l", "s"])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        batch = q.shape[:-2] if enable_gqa else torch.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)))
        return run_like_other_ranks(function, (*batch, q.shape[-2], v.shape[-1]), q, k, v, *others)

    return contract(attend, operands, labels, [*batch_names, "l", "f"], shape, unsplit)


def _dropout_mask(operands: Sequence[torch.Tensor], shape: Sequence[int], p: float) -> torch.Tensor:
    """Return the attention weights (..., L, S) that dropout keeps, as drawn by a single process. Collective."""
    like = next(t for t in operands if isinstance(t, DistTensor))
    if like.is_cuda:
        raise NoRule(
            "attention with dropout on a GPU has no distributed rule, because torch's kernels draw other numbers: "
            "set dropout_p=0"
        )
    # As torch, which draws no numbers in this case: the state of the generator must not change.
    if p == 1:
        return torch.zeros(tuple(shape), dtype=torch.bool)
    # All ranks draw the full mask, so that it is the one of a single process.
    check_same_generator_state(like)
    return torch.empty(tuple(shape), dtype=torch.bool).bernoulli_(1 - p)


def _attention_with_dropout(
    p: float,
    masked: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *others: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Return attention of one rank's blocks; ``others`` are the mask, if there is one, and the mask of dropout.

    The steps are those of torch on a CPU, which has no fused kernel with dropout.
    """
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    # Half of the scale on each side, as in torch, so that half precision does not overflow in the product.
    factor = math.sqrt(q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (q * factor) @ (k * factor).mT
    if is_causal:
        below = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~below, -math.inf)
    if masked:
        mask = others[0]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # Queries that see no key: softmax would give NaN where torch's kernels give zeros.
    nowhere = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nowhere, 0.0).softmax(-1).masked_fill(nowhere, 0.0)
    return (weights * others[-1].to(weights.dtype).div_(1 - p if p < 1 else 1)) @ v


# -- encoders in evaluation -------------------------------------------------------------------------------------------


@implements(torch._nested_tensor_from_mask_left_aligned, kind=OperatorKind.QUERY, tensors=None)
def is_left_aligned(t: torch.Tensor, mask: torch.Tensor) -> bool:
    """Return True if ``mask`` keeps the first positions of each sample, and no others.

    Parameters
    ----------
    t : Tensor
        The padded sequences, which are not used.
    mask : Tensor
        (N, L), True at positions to keep.
    """
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _returns_zeros_at_padding(encoder: nn.TransformerEncoder, src: torch.Tensor, mask: Any, padding: Any) -> bool:
    """Return True if torch's fast path in a single process removes padded positions and returns zeros for them."""
    # torch's own conditions. It checks those about parameters on the first layer only.
    first: Any = encoder.layers[0]
    if mask is not None or padding is None or src.dim() != 3 or first.training or torch.is_autocast_enabled():
        return False
    if not (torch.backends.mha.get_fastpath_enabled() and getattr(encoder, "use_nested_tensor", False)):
        return False
    if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())):
        return False
    return not getattr(encoder, "mask_check", True) or is_left_aligned(src, padding == 0)


_torch_forward = nn.TransformerEncoder.forward


@wraps(_torch_forward)
def _forward_with_zero_padding(
    self: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    if not isinstance(src, DistTensor) or not _returns_zeros_at_padding(self, src, mask, src_key_padding_mask):
        return _torch_forward(self, src, mask, src_key_padding_mask, is_causal)
    assert src_key_padding_mask is not None
    padded = (src_key_padding_mask != 0)[..., None]
    if self.norm is None:
        return _torch_forward(self, src, mask, src_key_padding_mask, is_causal).masked_fill(padded, 0.0)
    # torch's fast path fills the padding before the last norm, whose bias then shows there.
    before_norm = self.norm.register_forward_pre_hook(lambda _, args: (args[0].masked_fill(padded, 0.0), *args[1:]))
    try:
        return _torch_forward(self, src, mask, src_key_padding_mask, is_causal)
    finally:
        before_norm.remove()


patches.declare(
    nn.TransformerEncoder, "forward", _forward_with_zero_padding, "it reads the padding mask below torch's functions"
)
