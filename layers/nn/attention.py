"""Scaled dot-product attention: samples, heads and queries keep their splits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import implements
from distconv.errors import NoRule
from distconv.layers.math.matmul import batch_labels, contract
from distconv.layers.plumbing.alignment import result_shape
from distconv.layers.plumbing.empty_blocks import like_other_ranks
from distconv.tensor import DistTensor


@implements(F.scaled_dot_product_attention)
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
