"""Transposed convolution, split over samples, space, channels and filters.

Each rank gathers the inputs whose outputs meet its block, computes these outputs, and crops the surplus. If channels
are split, partial sums of the filters are reduce-scattered.

Source: Dryden et al. 2019, eq. 3 (the adjoint of convolution), III-A and, for channels, III-D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import StridePolicy, implements
from distconv.errors import NoRule
from distconv.kernels.convolution import Geometry, Range
from distconv.layers.common.alignment import check_dtypes, check_on_zeros, replicate_parameters, result_shape
from distconv.layers.common.empty_blocks import connected_zeros, pad_to_minimum_shape
from distconv.layers.common.input_windows import gather_needed_input, spatial_box, to_tuple
from distconv.layers.common.sharded_weights import (
    channel_needs,
    parameter_block,
    redistribute_channels,
    reduce_scatter_output,
    run_with_gathered_channels,
    weight_block,
)
from distconv.layers.tensor.reshaping import squeeze, unsqueeze
from distconv.parameters.channel_split import AXIS, ChannelSplit, channel_split, groups_divide
from distconv.tensor import DistTensor


def transposed_convolution(
    function: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> DistTensor:
    """Compute ``torch.conv_transpose1d``, ``2d`` or ``3d``.

    Parameters
    ----------
    function : callable
        torch's function. It determines shapes and errors, and computes the outputs of the gathered inputs.
    input : DistTensor
        x (N, C, [D, [H,]] W), or (C, [D, [H,]] W) without a sample dimension. Any dimension may be split.
    weight : Tensor or DistTensor
        w (C, F / groups, [kD, [kH,]] kW). A plain tensor is identical on all ranks.
    bias : Tensor or DistTensor, optional
        Shape (F,).
    stride, padding, output_padding, groups, dilation
        As in torch.

    Returns
    -------
    DistTensor
        y (N, F, [D, [H,]] W), distributed as the input, in balanced blocks.

    Raises
    ------
    ShapeError, DtypeError
        If torch rejects the operands, with torch's message on all ranks.
    NoRule
        If ``input`` is a plain tensor.
    """
    options = (stride, padding, output_padding, groups, dilation)
    check_dtypes(function, input, weight, bias, *options)
    out_shape = result_shape(function, input, weight, bias, *options)
    count = weight.dim() - 2
    strides, dilations = to_tuple(stride, count), to_tuple(dilation, count)
    # The meta implementation accepts these options, and torch's kernels reject them.
    extra = zip(to_tuple(output_padding, count), strides, dilations, strict=True)
    if min(to_tuple(padding, count)) < 0 or any(e >= max(s, d) for e, s, d in extra):
        check_on_zeros(function, input, weight, bias, *options)
    if not isinstance(input, DistTensor):
        raise NoRule("transposed convolution of a plain tensor with a distributed weight: scatter the input first")
    if input.dim() == count + 1:
        return squeeze(transposed_convolution(function, unsqueeze(input, 0), weight, bias, *options), 0)

    x = redistribute_channels(input, 1, weight)
    geometry = Geometry(tuple(weight.shape[2:]), strides, to_tuple(padding, count), dilations)
    if x.dist.split[1] is None:
        w, b = replicate_parameters(weight, bias, x.dist)
        y = _compute_block(function, x, w, out_shape, geometry, groups, None)
    else:  # channel and filter parallelism
        parts = x.grid.shape[AXIS]
        if not groups_divide(groups, out_shape[1], parts):

            def compute(x: DistTensor, weight: torch.Tensor, bias: torch.Tensor | None) -> DistTensor:
                return transposed_convolution(function, x, weight, bias, *options)

            return run_with_gathered_channels(compute, x, weight, bias)
        split = channel_split(x.shape[1], out_shape[1], groups, parts, geometry.stride, transposed=True)
        w = weight_block(weight, x.dist, split, transposed=True)
        b = None if bias is None else parameter_block(bias, x.dist, [1])
        y = _compute_block(function, x, w, out_shape, geometry, groups, split)
        y = reduce_scatter_output(y, x.dist, out_shape, 1, split)
    # Only now, because each partial sum would add the bias.
    if b is not None:
        y = y + b.to(y.dtype).view(-1, *(1,) * count)
    return DistTensor(y, x.dist, out_shape)


def _compute_block(
    function: Any,
    x: DistTensor,
    weight: torch.Tensor,
    out_shape: torch.Size,
    geometry: Geometry,
    groups: int,
    split: ChannelSplit | None,
) -> torch.Tensor:
    """Return this rank's block of y without bias, or a partial sum of it if channels are split. Collective."""
    count = len(geometry.kernel)
    windows = _TransposedWindows(geometry, tuple(x.shape[2:]))
    channels = None if split is None else channel_needs(x.dist, 1, split)
    block = gather_needed_input(x, out_shape, windows, channels=channels)
    filters = out_shape[1] if split is None else split.output_filters(x.dist.coordinate(1)).extent
    local_shape = (x.local.shape[0], filters, *x.dist.local_shape(out_shape)[2:])
    local_groups = groups if split is None else split.local_groups
    is_empty = 0 in local_shape or not block.numel()
    if is_empty:
        block = pad_to_minimum_shape(block, (1, local_groups, *(1,) * count))
        weight = pad_to_minimum_shape(weight, (local_groups, 1, *geometry.kernel))
    # Without padding, all outputs that the gathered inputs reach; the surplus is cropped below.
    y = function(block, weight, None, geometry.stride, 0, 0, local_groups, geometry.dilation)
    if is_empty:
        return connected_zeros(y, local_shape)
    around: list[int] = []
    for dim, out in enumerate(spatial_box(x.dist, out_shape)):
        inputs = windows.needed(dim, out)
        # The range of outputs that the inputs reach. Negative padding crops it to this rank's outputs; positive padding
        # adds outputs that no input reaches (output_padding). F.pad takes the last dimension first.
        start = inputs[0] * geometry.stride[dim] - geometry.padding[dim]
        stop = (inputs[1] - 1) * geometry.stride[dim] - geometry.padding[dim] + geometry.reach(dim)
        around[:0] = (start - out[0], out[1] - stop)
    return F.pad(y, around) if any(around) else y


@dataclass(frozen=True)
class _TransposedWindows:
    """The windows of a transposed convolution: the inputs whose outputs meet a range of outputs."""

    geometry: Geometry
    extents: tuple[int, ...]
    """Spatial size of the input."""

    def needed(self, dim: int, out: Range) -> Range:
        """Return the range of inputs whose outputs meet the range ``out``."""
        return (0, 0) if out[0] >= out[1] else self.geometry.touched(dim, out, (0, self.extents[dim]))


_implements = partial(implements, order=StridePolicy.OF_LAYER, tensors="input weight bias")
_implements(torch.conv_transpose1d, F.conv_transpose1d)(partial(transposed_convolution, torch.conv_transpose1d))
_implements(torch.conv_transpose2d, F.conv_transpose2d)(partial(transposed_convolution, torch.conv_transpose2d))
_implements(torch.conv_transpose3d, F.conv_transpose3d)(partial(transposed_convolution, torch.conv_transpose3d))
