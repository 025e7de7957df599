"""Computation on ranks whose block is empty.

Many functions of torch reject empty tensors. A rank with an empty block therefore computes on a few zeros and keeps no
element of the result. So its result has the dtype of the other ranks, it raises the errors that they raise, and its
autograd graph is the same. The graph must be the same because backward passes, of any order, send their messages in its
order: a rank that sends none leaves the others waiting. Operators on blocks call this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from distconv.tensor import DistTensor


def run_like_other_ranks(
    function: Callable[..., torch.Tensor], shape: Sequence[int], *blocks: torch.Tensor | None
) -> torch.Tensor:
    """Call a function on blocks, or on zeros if a block or the result is empty.

    No communication.

    Parameters
    ----------
    function : callable
        Takes the blocks and returns a tensor.
    shape : sequence of int
        Shape of the result on this rank.
    *blocks : Tensor or None
        Arguments of ``function``. Each dimension of an empty one is padded to at least one element.

    Returns
    -------
    Tensor
        The result, of shape ``shape``.
    """
    # Ranks may differ in this branch, since no message is sent in it.
    if 0 not in shape and all(block is None or block.numel() for block in blocks):
        return function(*blocks)
    padded = (None if block is None else pad_to_minimum_shape(block, (1,) * block.dim()) for block in blocks)
    return connected_zeros(function(*padded), shape)


def run_with_gathered_dims(
    function: Callable[[torch.Tensor], torch.Tensor], input: DistTensor, dims: Sequence[int], out_shape: torch.Size
) -> DistTensor:
    """Call a function on a tensor with some dimensions gathered, and split the result again.

    Collective: call on every rank. Ranks along the gathered dimensions compute the same.

    Parameters
    ----------
    function : callable
        Takes this rank's block, in which ``dims`` are complete, and returns this rank's block of the result.
    input : DistTensor
    dims : sequence of int
        Dimensions to gather.
    out_shape : torch.Size
        Global shape of the result.

    Returns
    -------
    DistTensor
        Split along the dimensions that split ``input``, in balanced blocks.
    """
    gathered = input.replicated(dims)
    y = run_like_other_ranks(function, gathered.dist.local_shape(out_shape), gathered.local)
    return DistTensor(y, gathered.dist, out_shape).redistribute(input.dist.balanced())


def pad_to_minimum_shape(block: torch.Tensor, extents: Sequence[int]) -> torch.Tensor:
    """Return a block padded with zeros at the end of each dimension that is too short.

    Parameters
    ----------
    block : Tensor
    extents : sequence of int
        Minimum size of each dimension.

    Returns
    -------
    Tensor
        ``block`` itself if it is large enough.
    """
    return _pad_or_crop(block, [max(n, least) for n, least in zip(block.shape, extents, strict=True)])


def connected_zeros(y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return zeros of a given shape that are connected to the autograd graph of a tensor.

    Parameters
    ----------
    y : Tensor
        Its values are not used, and its gradient is zero.
    shape : sequence of int
        Shape of the result, with as many dimensions as ``y``.

    Returns
    -------
    Tensor
    """
    return _pad_or_crop(y[:0], shape)


def _pad_or_crop(block: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return ``block`` padded with zeros, or cropped, at the end of each dimension to ``shape``."""
    # F.pad takes (before, after) of the last dimension first; the reversed list has them in this order.
    around = [n for size, wanted in zip(block.shape, shape, strict=True) for n in (wanted - size, 0)][::-1]
    return F.pad(block, around) if any(around) else block
