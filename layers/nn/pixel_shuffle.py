"""Shuffles between channels and space, unfold and fold.

Pixel shuffles move blocks between ranks such that each rank shuffles its own block. Channel shuffle, unfold and fold
gather the dimensions that they mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import StridePolicy, implements
from distconv.distribution import Distribution
from distconv.layers.common.alignment import result_shape
from distconv.layers.common.block_edges import balanced_edges, distribution_from_edges
from distconv.layers.common.empty_blocks import run_with_gathered_dims
from distconv.layers.common.input_windows import empty_output
from distconv.tensor import DistTensor


def _distribution_in_units(dist: Distribution, shape: Sequence[int], units: Sequence[int]) -> Distribution:
    """Return the distribution of a tensor of ``shape`` whose blocks are balanced blocks of ``units``, scaled."""
    edges = {}
    for dim, axis in enumerate(dist.split):
        if axis is not None:
            scale = shape[dim] // max(1, units[dim])
            edges[axis] = tuple(scale * edge for edge in balanced_edges(units[dim], dist.grid.shape[axis]))
    return distribution_from_edges(dist.grid, dist.axes, edges)


@implements(torch.pixel_shuffle, order=StridePolicy.OF_INPUT_ON_CPU)
def pixel_shuffle(input: DistTensor, upscale_factor: int) -> DistTensor:
    """Compute ``F.pixel_shuffle`` of x (..., C, H, W) block by block.

    Parameters
    ----------
    input, upscale_factor
        As in ``F.pixel_shuffle``.

    Returns
    -------
    DistTensor
    """
    return _shuffle(torch.pixel_shuffle, input, upscale_factor)


@implements(torch.pixel_unshuffle)
def pixel_unshuffle(input: DistTensor, downscale_factor: int) -> DistTensor:
    """Compute ``F.pixel_unshuffle`` of x (..., C, H, W) block by block.

    Parameters
    ----------
    input, downscale_factor
        As in ``F.pixel_unshuffle``.

    Returns
    -------
    DistTensor
    """
    return _shuffle(torch.pixel_unshuffle, input, downscale_factor)


def _shuffle(function: Callable[..., torch.Tensor], input: DistTensor, factor: int) -> DistTensor:
    """Compute either shuffle of x (..., C, H, W) block by block.

    Every dimension grows or shrinks by an integer factor. Blocks are moved so that the factor divides their sizes,
    shuffled, and moved to balanced blocks again. No dimension is gathered.
    """
    out_shape = result_shape(function, input, factor)
    # Channels and space change in opposite directions. The smaller size of each is the number of indivisible units.
    units = [min(before, after) for before, after in zip(input.shape, out_shape, strict=True)]
    x = input.redistribute(_distribution_in_units(input.dist, input.shape, units))
    dist = _distribution_in_units(input.dist, out_shape, units)
    # For an empty block, the gradient of torch's shuffle has the wrong shape.
    y = function(x.local, factor) if x.local.numel() else empty_output(x.local, dist.local_shape(out_shape))
    return DistTensor(y, dist, out_shape).redistribute(input.dist.balanced())


def _channel_shuffle(function: Callable[..., torch.Tensor], input: DistTensor, groups: int) -> DistTensor:
    """Compute ``torch.channel_shuffle`` of x (N, C, ...); split channels are gathered and split again."""
    shape = result_shape(function, input, groups)
    return run_with_gathered_dims(lambda block: function(block, groups), input, [1], shape)


for _function in (torch.channel_shuffle, torch.native_channel_shuffle):
    implements(_function, order=StridePolicy.OF_INPUT_ON_CPU)(partial(_channel_shuffle, _function))


def _call_per_sample(
    function: Callable[..., torch.Tensor], sample_dims: int, input: DistTensor, *options: Any
) -> DistTensor:
    """Call ``function`` on complete samples of ``sample_dims`` dimensions; the result is split over samples only."""
    out_shape = result_shape(function, input, *options)
    batch = input.dim() - sample_dims
    x = input.replicated(range(batch, input.dim()))
    axes = [*x.dist.axes[:batch], *(None,) * (len(out_shape) - batch)]
    return DistTensor(function(x.local, *options), x.dist.with_axes(axes), out_shape)


@implements(F.unfold)
def unfold(input: DistTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> DistTensor:
    """Compute ``F.unfold`` of x ([N,] C, H, W) with channels and space gathered.

    The columns of windows are not split.

    Parameters
    ----------
    input, kernel_size, dilation, padding, stride
        As in ``F.unfold``.

    Returns
    -------
    DistTensor
    """
    return _call_per_sample(F.unfold, 3, input, kernel_size, dilation, padding, stride)


@implements(F.fold)
def fold(
    input: DistTensor,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> DistTensor:
    """Compute ``F.fold`` of columns ([N,] C * K, L), which are gathered.

    The space of the result is not split.

    Parameters
    ----------
    input, output_size, kernel_size, dilation, padding, stride
        As in ``F.fold``.

    Returns
    -------
    DistTensor
    """
    return _call_per_sample(F.fold, 2, input, output_size, kernel_size, dilation, padding, stride)
