"""Blocks of weights and reduce-scatter of partial sums for layers whose channels are split.

Convolution, transposed convolution, linear layers and normalization call it. The ranges of channels and filters of each
rank are computed by ``distconv.parameters.channel_split``. ``distconv.parameters.sharding`` places the parameters of a
module in these blocks from the start.

Source: Dryden et al. 2019, III-D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distconv.communication.collectives import both_with_grad_allreduce, reduce_scatter_region, with_grad_allreduce
from distconv.communication.routes import Needs
from distconv.communication.transfer import transfer_plan
from distconv.distribution import Distribution, Interval
from distconv.layers.common.alignment import redistribute_balanced
from distconv.parameters.channel_split import AXIS, ChannelSplit
from distconv.tensor import DistTensor


def channel_needs(dist: Distribution, dim: int, split: ChannelSplit) -> tuple[int, tuple[Interval, ...]]:
    """Return the entry of :class:`Needs` for the channels.

    Parameters
    ----------
    dist : Distribution
        Distribution of the layer's input.
    dim : int
        The channel dimension.
    split : ChannelSplit

    Returns
    -------
    tuple of int and tuple of Interval
        The dimension, and the channels that each coordinate along axis ``c`` needs.
    """
    return dim, tuple(split.input_channels(index) for index in range(dist.grid.shape[AXIS]))


def weight_block(
    weight: torch.Tensor, dist: Distribution, split: ChannelSplit, *, transposed: bool = False
) -> torch.Tensor:
    """Return the block of the weight with which this rank computes.

    Collective: call on every rank. Its gradient is all-reduced over the axes that split the work but not the weight.

    Parameters
    ----------
    weight : Tensor or DistTensor
        A sharded weight is usually in these blocks already, so that nothing is sent. A plain weight is identical on all
        ranks, and so is its gradient.
    dist : Distribution
        Distribution of the layer's input.
    split : ChannelSplit
    transposed : bool
        True for the weight (C, F / groups, ...) of a transposed convolution. Otherwise it is (F, C / groups, ...).

    Returns
    -------
    Tensor
    """
    layout = split.weight_layout(dist.grid, weight.shape, transposed=transposed)
    if isinstance(weight, DistTensor):
        return with_grad_allreduce(
            weight.redistribute(layout).local, dist.grid, [a for a in dist.split_axes if a != AXIS]
        )
    part = tuple(slice(i.start, i.stop) for i in layout.box(None, weight.shape))
    # Slice after the all-reduce node: in backward the slice fills the gradient with zeros, and the sum over all axes,
    # `c` included, then assembles the full gradient, identical on all ranks.
    return with_grad_allreduce(weight, dist.grid, dist.split_axes)[part]


def parameter_block(
    parameter: torch.Tensor, dist: Distribution, dims: Sequence[int], axes: Sequence[str] | None = None
) -> torch.Tensor:
    """Return the part of a parameter that applies to this rank's block.

    Collective: call on every rank. Its gradient is all-reduced over those of ``axes`` that do not split the parameter.

    Parameters
    ----------
    parameter : Tensor or DistTensor
        A plain tensor is identical on all ranks.
    dist : Distribution
        Distribution of the tensor to which the parameter is applied.
    dims : sequence of int
        Its dimensions that the parameter spans. None of them is block-cyclic.
    axes : sequence of str, optional
        Axes over which the work is split (default: all axes that split ``dist``).

    Returns
    -------
    Tensor
    """
    summed = dist.split_axes if axes is None else axes
    if isinstance(parameter, DistTensor):
        wanted = dist.with_axes([dist.axes[dim] for dim in dims])
        # Over these axes ranks have different elements of the parameter, whose gradients must not be added.
        split = {dist.split[dim] for dim in dims}
        return with_grad_allreduce(
            parameter.redistribute(wanted).local, dist.grid, [a for a in summed if a not in split]
        )
    return _local_part(with_grad_allreduce(parameter, dist.grid, summed), dist, dims)


def parameter_blocks(
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dist: Distribution,
    dims: Sequence[int],
    axes: Sequence[str] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the parts of a layer's weight and bias that apply to this rank's block.

    Collective: call on every rank. The gradients of a plain weight and bias are all-reduced by one call.

    Parameters
    ----------
    weight, bias : Tensor or DistTensor, optional
    dist, dims, axes
        As in :func:`parameter_block`.

    Returns
    -------
    tuple of (Tensor or None) and (Tensor or None)
    """
    # As in replicate_parameters, one all-reduce for both saves the latency of a message.
    if weight is None or bias is None or isinstance(weight, DistTensor) or isinstance(bias, DistTensor):
        w, b = (None if p is None else parameter_block(p, dist, dims, axes) for p in (weight, bias))
        return w, b
    weight, bias = both_with_grad_allreduce(weight, bias, dist.grid, dist.split_axes if axes is None else axes)
    return _local_part(weight, dist, dims), _local_part(bias, dist, dims)


def _local_part(parameter: torch.Tensor, dist: Distribution, dims: Sequence[int]) -> torch.Tensor:
    """Return this rank's part of a full parameter that spans ``dims``."""
    if all(dist.split[dim] is None for dim in dims):
        return parameter
    parameter_dist = dist.with_axes([dist.axes[dim] for dim in dims])
    return parameter[tuple(slice(i.start, i.stop) for i in parameter_dist.box(None, parameter.shape))]


def reduce_scatter_output(
    y: torch.Tensor, dist: Distribution, shape: torch.Size, dim: int, split: ChannelSplit
) -> torch.Tensor:
    """Return this rank's block of y: the sum of the partial sums that ranks along axis ``c`` have computed.

    Collective: call on every rank. One reduce-scatter, or nothing if ``split.blocks`` is 1, so that y is complete.

    Parameters
    ----------
    y : Tensor
        Partial sum of the filters that this rank computes.
    dist : Distribution
        Distribution of the output.
    shape : torch.Size
        Global shape of the output.
    dim : int
        The filter dimension.
    split : ChannelSplit

    Returns
    -------
    Tensor
    """
    if split.blocks == 1:
        return y
    # The transfer of y from the owners to the ranks that compute it, run backward: sums arrive at the owners.
    computed = tuple(split.output_filters(index) for index in range(dist.grid.shape[AXIS]))
    return reduce_scatter_region(y, transfer_plan(dist, Needs(dist, ((dim, computed),)), tuple(shape)))


def run_with_gathered_channels(
    convolve: Callable[..., DistTensor], x: DistTensor, *weights: torch.Tensor | None
) -> DistTensor:
    """Run a layer whose groups do not divide over axis ``c`` with gathered channels.

    Collective: call on every rank. Every rank along ``c`` computes all filters and keeps its own.

    Parameters
    ----------
    convolve : callable
        Takes x and the weights, whose channels are not split.
    x : DistTensor
        (N, C, ...).
    *weights : Tensor, DistTensor or None

    Returns
    -------
    DistTensor
        Distributed as ``x``, in balanced blocks.
    """
    full = (w.replicated() if isinstance(w, DistTensor) else w for w in weights)
    return convolve(x.replicated([1]), *full).redistribute(x.dist.balanced())


def redistribute_channels(x: DistTensor, dim: int, weight: torch.Tensor) -> DistTensor:
    """Return the input of a layer with its channels in balanced blocks over axis ``c``, or not split.

    Collective: call on every rank. Split channels stay split over ``c``. If the channels are not split, they are split
    if the weight is sharded and the grid has axis ``c``. Channels that are split over another axis are gathered, or
    move to axis ``c`` if the weight is sharded.

    Parameters
    ----------
    x : DistTensor
    dim : int
        The channel dimension.
    weight : Tensor or DistTensor
        The layer's weight.

    Returns
    -------
    DistTensor
        All of its blocks are balanced.
    """
    sharded = isinstance(weight, DistTensor) and bool(weight.dist.split_axes)
    split = x.dist.split[dim]
    if split == AXIS or (split is None and not sharded):
        return redistribute_balanced(x)
    axes = list(x.dist.axes)
    # An axis splits one dimension only, so channels cannot move to `c` if it splits another one.
    axes[dim] = AXIS if sharded and x.grid.shape[AXIS] > 1 and AXIS not in x.dist.split else None
    return x.redistribute(Distribution(x.grid, axes))
