"""What a rank without elements computes: the same on a few zeros, of which it keeps nothing.

So its results have the dtype of other ranks', it raises what they raise, and its graph is theirs in derivatives of any
order: which messages backward passes send follows from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from distconv.tensor import DistTensor


def run_like_other_ranks(
    function: Callable[..., torch.Tensor], shape: Sequence[int], *blocks: torch.Tensor | None
) -> torch.Tensor:
    """``function(*blocks)``, of ``shape``; where a block has no elements, of blocks with some."""
    if 0 not in shape and all(block is None or block.numel() for block in blocks):
        return function(*blocks)
    filled = (None if block is None else pad_to_minimum_shape(block, (1,) * block.dim()) for block in blocks)
    return connected_zeros(function(*filled), shape)


def whole_along(
    function: Callable[[torch.Tensor], torch.Tensor], input: DistTensor, dims: Sequence[int], out_shape: torch.Size
) -> DistTensor:
    """``function`` of ``input`` with ``dims`` gathered, on every rank that has the rest alike, and split again."""
    whole = input.replicated(dims)
    y = run_like_other_ranks(function, whole.dist.local_shape(out_shape), whole.local)
    return DistTensor(y, whole.dist, out_shape).redistribute(input.dist.balanced())


def pad_to_minimum_shape(block: torch.Tensor, extents: Sequence[int]) -> torch.Tensor:
    """``block``, filled up with zeros to ``extents`` where it has less."""
    return _resized(block, [max(n, least) for n, least in zip(block.shape, extents, strict=True)])


def connected_zeros(y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of ``shape``, if that has any, in the graph of ``y``."""
    return _resized(y[:0], shape)


def _resized(block: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    around = [n for have, wanted in zip(block.shape, shape, strict=True) for n in (wanted - have, 0)][::-1]
    return F.pad(block, around) if any(around) else block
