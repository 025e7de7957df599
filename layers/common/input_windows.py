"""Inputs of operators that compute each output from a window of the input.

Convolution, pooling, resampling and padding call it. An operator describes its windows by :class:`InputWindows`;
:func:`gather_needed_input` gathers the index range of the input from which this rank's block of the output is computed.

Source: Dryden et al. 2019, III-A.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from distconv.communication.collectives import gather_region
from distconv.communication.routes import Needs
from distconv.communication.transfer import transfer_plan
from distconv.distribution import Distribution, Interval
from distconv.grid import cached_on_grid
from distconv.kernels.convolution import Range
from distconv.tensor import DistTensor

ChannelNeeds = tuple[int, tuple[Interval, ...]]
"""The channel dimension, and the range of channels that each coordinate along its axis needs."""


class InputWindows(Hashable, Protocol):
    """The windows of an operator. Hashable by value, because plans are cached by it."""

    def needed(self, dim: int, out: Range) -> Range:
        """Return the range of input indices from which outputs are computed.

        Parameters
        ----------
        dim : int
            Spatial dimension, from 0.
        out : Range
            Range of output indices.

        Returns
        -------
        Range
            Half-open. Indices outside the input are padding.
        """


def to_tuple(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return an option of a layer as a tuple with a value for each spatial dimension.

    Parameters
    ----------
    value : int or sequence of int
        One value for all dimensions, or a value for each.
    count : int
        Number of spatial dimensions.

    Returns
    -------
    tuple of int
    """
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)


def window_needs(
    dist: Distribution,
    shape: Sequence[int],
    out_shape: Sequence[int],
    windows: InputWindows,
    channels: ChannelNeeds | None = None,
) -> Needs:
    """Return the input that each rank needs for its block of the output.

    A dimension along which all ranks own what they need is left out.

    Parameters
    ----------
    dist : Distribution
        Distribution of the input and of the output, in balanced blocks.
    shape : sequence of int
        Global shape (N, C, [D, [H,]] W) of the input.
    out_shape : sequence of int
        Global shape (N, F, [D, [H,]] W) of the output.
    windows : InputWindows
    channels : tuple, optional
        The needed channels (see :data:`ChannelNeeds`). By default each rank needs the channels that it owns.

    Returns
    -------
    Needs
    """
    needs = [] if channels is None else [channels]
    for dim, axis in enumerate(dist.split):
        # Dimensions 0 and 1 (samples, channels) have no windows. A dimension that no axis splits is on this rank
        # already.
        if dim >= 2 and axis is not None:
            ranks = range(dist.grid.shape[axis])
            needed = [Interval(*windows.needed(dim - 2, dist.intervals(dim, i, out_shape[dim])[0])) for i in ranks]
            owned = [dist.intervals(dim, i, shape[dim])[0] for i in ranks]
            inside = [need.intersect(Interval(0, shape[dim])) for need in needed]
            # The same decision on all ranks: an exchange is collective, and is a step of autograd's graph.
            if any(need.intersect(own).extent < need.extent for need, own in zip(inside, owned, strict=True)):
                needs.append((dim, tuple(needed)))
    return Needs(dist, tuple(needs))


def spatial_box(dist: Distribution, shape: Sequence[int]) -> tuple[Range, ...]:
    """Return the ranges of spatial indices that this rank owns.

    Parameters
    ----------
    dist : Distribution
    shape : sequence of int
        Global shape (N, C, [D, [H,]] W).

    Returns
    -------
    tuple of Range
        One for each spatial dimension.
    """
    return tuple((i.start, i.stop) for i in dist.box(None, shape)[2:])


# For operators without a plan of their own. The arguments are the key, so the shape must be hashable.
_cached_window_needs = cached_on_grid(window_needs)


def gather_needed_input(
    x: DistTensor,
    out_shape: torch.Size,
    windows: InputWindows,
    fill: float = 0.0,
    channels: ChannelNeeds | None = None,
    *,
    unpadded: Collection[int] = (),
) -> torch.Tensor:
    """Return exactly the input of this rank's block of the output, including ghosts and padding.

    Collective: call on every rank. A rank without outputs returns an empty block, but takes part in the exchange. In
    backward the gradients of ghosts are added at their owners.

    Parameters
    ----------
    x : DistTensor
        The input (N, C, [D, [H,]] W), in balanced blocks.
    out_shape : torch.Size
        Global shape of the output, which is distributed as ``x``.
    windows : InputWindows
    fill : float
        Value of the padding.
    channels : tuple, optional
        As in :func:`window_needs`.
    unpadded : collection of int
        Spatial dimensions without padding in the result, because the caller's kernel adds it.

    Returns
    -------
    Tensor
        (N, C, [D, [H,]] W) on this rank.
    """
    needs = _cached_window_needs(x.dist, x.shape, out_shape, windows, channels)
    # Every rank reaches this call, also one without outputs: its neighbours may need its block.
    local = gather_region(x.local, transfer_plan(x.dist, needs, tuple(x.shape))) if needs.needed else x.local
    wanted = [windows.needed(dim, out) for dim, out in enumerate(spatial_box(x.dist, out_shape))]
    for dim in unpadded:
        wanted[dim] = max(0, wanted[dim][0]), min(wanted[dim][1], x.shape[dim + 2])
    return crop_or_pad(local, needs.box(x.shape)[2:], wanted, fill)


def crop_or_pad(
    block: torch.Tensor, covered: Sequence[Interval], target: Sequence[Range], fill: float = 0.0
) -> torch.Tensor:
    """Return a block cropped or padded to given ranges of spatial indices.

    Parameters
    ----------
    block : Tensor
        (N, C, ...).
    covered : sequence of Interval
        Range of indices that ``block`` covers, for each spatial dimension.
    target : sequence of Range
        Range of indices that the result covers.
    fill : float
        Value of the padding.

    Returns
    -------
    Tensor
        ``block`` itself if it covers these ranges.
    """
    around: list[int] = []
    for interval, (start, stop) in zip(covered, target, strict=True):
        # Padding before and after the block; negative numbers crop it.
        if stop <= start:  # nothing is wanted
            before, after = 0, -interval.extent
        elif interval.extent:
            before, after = interval.start - start, stop - interval.stop
        else:  # an empty block has no position, so all of its padding is on one side
            before, after = stop - start, 0
        # F.pad takes the last dimension first.
        around[:0] = (before, after)
    # F.pad copies, even if there is nothing to pad.
    return F.pad(block, around, value=fill) if any(around) else block


def empty_output(block: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the result of a rank without outputs: an empty tensor that is connected to the autograd graph.

    Parameters
    ----------
    block : Tensor
        The rank's input, whose graph the result continues. See :mod:`distconv.layers.common.empty_blocks` for the
        reason.
    shape : sequence of int
        Shape of the result, with a dimension of size 0.

    Returns
    -------
    Tensor
    """
    # A copy, because an in-place operator on a view would increase the version of the block, which may be saved for
    # backward.
    return block.reshape(-1)[:0].reshape(tuple(shape)).clone()
