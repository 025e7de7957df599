"""What operators with weights do where channels are split: take their blocks of weights, sum shares at the owners.

Which rank has which channels and filters is arithmetic, in ``distconv.parameters.channel_split``; that a module's
parameters lie there from the start is ``distconv.parameters.sharding``.

Source: Dryden et al. 2019, III-D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distconv.communication.collectives import both_with_grad_allreduce, reduce_scatter_region, with_grad_allreduce
from distconv.communication.routes import Needs
from distconv.communication.transfer import transfer_plan
from distconv.distribution import Distribution, Interval
from distconv.layers.plumbing.alignment import balanced_input
from distconv.parameters.channel_split import AXIS, ChannelSplit
from distconv.tensor import DistTensor


def channel_needs(dist: Distribution, dim: int, split: ChannelSplit) -> tuple[int, tuple[Interval, ...]]:
    """Entry of :class:`Needs` for the channels, dimension ``dim``."""
    return dim, tuple(split.input_channels(index) for index in range(dist.grid.shape[AXIS]))


def weight_block(
    weight: torch.Tensor, dist: Distribution, split: ChannelSplit, *, transposed: bool = False
) -> torch.Tensor:
    """The block of ``weight`` that this rank works with, as it enters work that ``dist`` splits.

    A sharded one is as a rule there already; of a plain one a part is taken, and its gradient is whole on every rank.
    """
    layout = split.weight_layout(dist.grid, weight.shape, transposed=transposed)
    if isinstance(weight, DistTensor):
        return with_grad_allreduce(
            weight.redistribute(layout).local, dist.grid, [a for a in dist.split_axes if a != AXIS]
        )
    part = tuple(slice(i.start, i.stop) for i in layout.box(None, weight.shape))
    return with_grad_allreduce(weight, dist.grid, dist.split_axes)[part]


def parameter_block(
    parameter: torch.Tensor, dist: Distribution, dims: Sequence[int], axes: Sequence[str] | None = None
) -> torch.Tensor:
    """The part of ``parameter``, which spans the dimensions ``dims``, for the block that this rank owns under ``dist``.

    Its gradient is summed over those of ``axes`` (default: all that split ``dist``) that do not split it. None of
    ``dims`` may be block-cyclic.
    """
    summed = dist.split_axes if axes is None else axes
    if isinstance(parameter, DistTensor):
        wanted = dist.with_axes([dist.axes[dim] for dim in dims])
        split = {dist.split[dim] for dim in dims}
        return with_grad_allreduce(
            parameter.redistribute(wanted).local, dist.grid, [a for a in summed if a not in split]
        )
    return _part(with_grad_allreduce(parameter, dist.grid, summed), dist, dims)


def parameter_blocks(
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dist: Distribution,
    dims: Sequence[int],
    axes: Sequence[str] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """:func:`parameter_block` of a layer's weight and bias, as far as it has them."""
    if weight is None or bias is None or isinstance(weight, DistTensor) or isinstance(bias, DistTensor):
        w, b = (None if p is None else parameter_block(p, dist, dims, axes) for p in (weight, bias))
        return w, b
    weight, bias = both_with_grad_allreduce(weight, bias, dist.grid, dist.split_axes if axes is None else axes)
    return _part(weight, dist, dims), _part(bias, dist, dims)


def _part(whole: torch.Tensor, dist: Distribution, dims: Sequence[int]) -> torch.Tensor:
    """This rank's part of a parameter that spans ``dims``."""
    if all(dist.split[dim] is None for dim in dims):
        return whole
    wanted = dist.with_axes([dist.axes[dim] for dim in dims])
    return whole[tuple(slice(i.start, i.stop) for i in wanted.box(None, whole.shape))]


def summed_at_owners(
    y: torch.Tensor, dist: Distribution, shape: torch.Size, dim: int, split: ChannelSplit
) -> torch.Tensor:
    """This rank's block under ``dist`` of y of ``shape``, given the share ``y`` of the filters that it computes."""
    if split.blocks == 1:
        return y
    computed = tuple(split.output_filters(index) for index in range(dist.grid.shape[AXIS]))
    return reduce_scatter_region(y, transfer_plan(dist, Needs(dist, ((dim, computed),)), tuple(shape)))


def over_whole_channels(
    convolve: Callable[..., DistTensor], x: DistTensor, *weights: torch.Tensor | None
) -> DistTensor:
    """``convolve`` where groups do not divide over ``c``: every rank along it computes all filters, and keeps its own.

    ``convolve`` gets ``x`` with whole channels and the weights whole.
    """
    whole = (w.replicated() if isinstance(w, DistTensor) else w for w in weights)
    return convolve(x.replicated([1]), *whole).redistribute(x.dist.balanced())


def with_channels_split(x: DistTensor, dim: int, weight: torch.Tensor) -> DistTensor:
    """``x`` as a layer with ``weight`` takes it: channels, dimension ``dim``, in balanced blocks over ``c``, or whole.

    They stay split if they are; they are split if the weight is and the grid can. Other axes never split them.
    """
    sharded = isinstance(weight, DistTensor) and bool(weight.dist.split_axes)
    split = x.dist.split[dim]
    if split == AXIS or (split is None and not sharded):
        return balanced_input(x)
    axes = list(x.dist.axes)
    axes[dim] = AXIS if sharded and x.grid.shape[AXIS] > 1 and AXIS not in x.dist.split else None
    return x.redistribute(Distribution(x.grid, axes))
