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
from distconv.layers.common.alignment import both_whole_over, check_as_torch, check_dtypes, result_shape
from distconv.layers.common.empty_blocks import connected_zeros, pad_to_minimum_shape
from distconv.layers.common.input_windows import needed_block, spatial_box, spread
from distconv.layers.common.sharded_weights import (
    channel_needs,
    over_whole_channels,
    parameter_block,
    summed_at_owners,
    weight_block,
    with_channels_split,
)
from distconv.layers.tensor.reshaping import squeeze, unsqueeze
from distconv.parameters.channel_split import AXIS, channel_split, groups_divide
from distconv.tensor import DistTensor


@dataclass(frozen=True)
class _Reaching:
    """The windows of a transposed convolution: the inputs whose outputs meet a range of outputs."""

    geometry: Geometry
    extents: tuple[int, ...]
    """Spatial size of the input."""

    def needed(self, dim: int, out: Range) -> Range:
        """Return the range of inputs whose outputs meet the range ``out``."""
        return (0, 0) if out[0] >= out[1] else self.geometry.touched(dim, out, (0, self.extents[dim]))


def _transposed(
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
    """Compute ``torch.conv_transpose1d``, ``2d`` or ``3d`` of x (N, C, [D, [H,]] W).

    Any dimension of x may be split. Parameters as in torch.
    """
    check_dtypes(function, input, weight, bias, stride, padding, output_padding, groups, dilation)
    out_shape = result_shape(function, input, weight, bias, stride, padding, output_padding, groups, dilation)
    count = weight.dim() - 2
    extra, steps = spread(output_padding, count), zip(spread(stride, count), spread(dilation, count), strict=True)
    if min(spread(padding, count)) < 0 or any(e >= max(s, d) for e, (s, d) in zip(extra, steps, strict=True)):
        check_as_torch(function, input, weight, bias, stride, padding, output_padding, groups, dilation)
    if not isinstance(input, DistTensor):
        raise NoRule("transposed convolution of a plain tensor: scatter the input first")
    if input.dim() == count + 1:
        given = (weight, bias, stride, padding, output_padding, groups, dilation)
        return squeeze(_transposed(function, unsqueeze(input, 0), *given), 0)
    x = with_channels_split(input, 1, weight)
    if x.dist.split[1] is not None and not groups_divide(groups, out_shape[1], x.grid.shape[AXIS]):
        again = partial(_transposed, function, stride=stride, padding=padding, groups=groups, dilation=dilation)
        return over_whole_channels(partial(again, output_padding=output_padding), x, weight, bias)
    geometry = Geometry(tuple(weight.shape[2:]), spread(stride, count), spread(padding, count), spread(dilation, count))
    if x.dist.split[1] is None:
        split, needs = None, None
        w, b = both_whole_over(weight, bias, x.dist)
    else:
        parts = x.grid.shape[AXIS]
        split = channel_split(x.shape[1], out_shape[1], groups, parts, geometry.stride, transposed=True)
        w, needs = weight_block(weight, x.dist, split, transposed=True), channel_needs(x.dist, 1, split)
        b = None if bias is None else parameter_block(bias, x.dist, [1])
    reaching = _Reaching(geometry, tuple(x.shape[2:]))
    block = needed_block(x, out_shape, reaching, channels=needs)
    filters = out_shape[1] if split is None else split.output_filters(x.dist.coordinate(1)).extent
    local_shape = (x.local.shape[0], filters, *x.dist.local_shape(out_shape)[2:])
    local_groups = groups if split is None else split.local_groups
    empty = 0 in local_shape or not block.numel()
    if empty:
        block, w = (
            pad_to_minimum_shape(block, (1, local_groups, *(1,) * count)),
            pad_to_minimum_shape(w, (local_groups, 1, *geometry.kernel)),
        )
    y = function(block, w, None, geometry.stride, 0, 0, local_groups, geometry.dilation)
    if empty:
        y = connected_zeros(y, local_shape)
    else:
        out = spatial_box(x.dist, out_shape)
        around = [n for d in reversed(range(count)) for n in _surplus(geometry, d, reaching.needed(d, out[d]), out[d])]
        y = F.pad(y, around) if any(around) else y
    if split is not None:
        y = summed_at_owners(y, x.dist, out_shape, 1, split)
    if b is not None:
        y = y + b.to(y.dtype).view(-1, *(1,) * count)
    return DistTensor(y, x.dist, out_shape)


def _surplus(geometry: Geometry, dim: int, inputs: Range, out: Range) -> tuple[int, int]:
    """Return the padding (negative: cropping) that turns the outputs of ``inputs`` into the range ``out``."""
    start = inputs[0] * geometry.stride[dim] - geometry.padding[dim]
    stop = (inputs[1] - 1) * geometry.stride[dim] - geometry.padding[dim] + geometry.reach(dim)
    return start - out[0], out[1] - stop


for _d in (1, 2, 3):
    for _function in {getattr(h, f"conv_transpose{_d}d") for h in (torch, F)}:
        implements(_function, order=StridePolicy.OF_LAYER, tensors="input weight bias")(partial(_transposed, _function))
