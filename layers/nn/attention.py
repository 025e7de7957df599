"""Scaled dot-product attention: samples, heads and queries keep their splits; and torch's fast path of encoders.

Importing this module lets ``nn.TransformerEncoder`` give what that gives: zeros at padded places.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.dispatch import Kind, implements
from distconv.errors import NoRule
from distconv.layers.math.matmul import batch_labels, contract
from distconv.layers.plumbing.alignment import result_shape
from distconv.layers.plumbing.empty_blocks import like_other_ranks
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
    """``F.scaled_dot_product_attention``: samples, heads and queries keep their splits; keys are gathered.

    Raises
    ------
    NoRule
        With dropout.
    """
    if dropout_p:
        raise NoRule("attention with dropout: its mask would depend on the grid; set dropout_p=0")
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    shape = result_shape(F.scaled_dot_product_attention, query, key, value, attn_mask, 0.0, **options)
    operands, labels = (
        [query, key, value],
        [[*batch_labels(t, 2), *own] for t, own in ((query, "le"), (key, "se"), (value, "sf"))],
    )
    whole = ["s", "e", *(["l"] if is_causal else []), *(["batch 1"] if enable_gqa else [])]
    if attn_mask is not None:
        operands.append(attn_mask)
        labels.append([*batch_labels(attn_mask, 2), "l", "s"])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        function = partial(F.scaled_dot_product_attention, **options)
        batch = q.shape[:-2] if enable_gqa else torch.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)))
        return like_other_ranks(function, (*batch, q.shape[-2], v.shape[-1]), q, k, v, mask)

    batch = max((names[:-2] for names in labels), key=len)
    return contract(attend, operands, labels, [*batch, "l", "f"], shape, whole)


# -- encoders in evaluation -------------------------------------------------------------------------------------------


@implements(torch._nested_tensor_from_mask_left_aligned, kind=Kind.QUERY, tensors=None)
def is_left_aligned(t: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether ``mask`` (N, L) keeps the first places of each sample, and no others."""
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _pads_with_zeros(encoder: nn.TransformerEncoder, src: torch.Tensor, mask: Any, padding: Any) -> bool:
    """Whether torch's fast path in one process takes the padded places out, and puts zeros there."""
    first: Any = encoder.layers[0]
    if mask is not None or padding is None or src.dim() != 3 or first.training or torch.is_autocast_enabled():
        return False
    if not (torch.backends.mha.get_fastpath_enabled() and getattr(encoder, "use_nested_tensor", False)):
        return False
    if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())):
        return False
    return not getattr(encoder, "mask_check", True) or is_left_aligned(src, padding == 0)


_encode = nn.TransformerEncoder.forward


@wraps(_encode)
def _encoded(
    self: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    if not isinstance(src, DistTensor) or not _pads_with_zeros(self, src, mask, src_key_padding_mask):
        return _encode(self, src, mask, src_key_padding_mask, is_causal)
    assert src_key_padding_mask is not None
    padded = (src_key_padding_mask != 0)[..., None]
    if self.norm is None:
        return _encode(self, src, mask, src_key_padding_mask, is_causal).masked_fill(padded, 0.0)
    before_norm = self.norm.register_forward_pre_hook(lambda _, args: (args[0].masked_fill(padded, 0.0), *args[1:]))
    try:
        return _encode(self, src, mask, src_key_padding_mask, is_causal)
    finally:
        before_norm.remove()


patches.replace(nn.TransformerEncoder, "forward", _encoded, "it looks below torch's functions for what is padded")
