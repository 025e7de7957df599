"""Max, average, adaptive and global pooling, with windows that may cross block borders.

Source: Dryden et al. 2019, III-B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import implements
from distconv.errors import UnsupportedOperation
from distconv.kernels.convolution import Geometry, Range
from distconv.layers.alignment import balanced_input, result_shape
from distconv.layers.reductions import mean
from distconv.layers.windows import needed_block, no_outputs, spatial_box, spread
from distconv.tensor import DistTensor

Size = int | Sequence[int]

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Callable[..., torch.Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _batched(input: DistTensor, count: int, operator: str) -> DistTensor:
    if input.dim() != count + 2:
        raise UnsupportedOperation(
            f"{operator} of {input.dim()} dimensions without a sample dimension: add it (unsqueeze(0))"
        )
    return balanced_input(input)


def _max_pool(
    count: int,
    input: DistTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> DistTensor:
    """``F.max_pool1d``, ``2d`` or ``3d`` of x (N, C, [D, [H,]] W)."""
    if return_indices:
        raise UnsupportedOperation(
            "max pooling with return_indices=True: indices into distributed blocks are not offered"
        )
    stride = stride or kernel_size
    pool = _MAX[count]
    out_shape = result_shape(pool, input, kernel_size, stride, padding, dilation, ceil_mode)
    x = _batched(input, count, "max pooling")
    geometry = Geometry(
        spread(kernel_size, count), spread(stride, count), spread(padding, count), spread(dilation, count)
    )
    block = needed_block(x, out_shape, geometry, -math.inf)
    local_shape = x.dist.local_shape(out_shape)
    if 0 in local_shape:
        return DistTensor(no_outputs(block, local_shape), x.dist, out_shape)
    return DistTensor(pool(block, geometry.kernel, geometry.stride, 0, geometry.dilation), x.dist, out_shape)


def _avg_pool(
    count: int,
    input: DistTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> DistTensor:
    """``F.avg_pool1d``, ``2d`` or ``3d`` of x (N, C, [D, [H,]] W)."""
    stride = stride or kernel_size
    pool = _AVERAGE[count]
    options = {} if divisor_override is None else {"divisor_override": divisor_override}
    out_shape = result_shape(pool, input, kernel_size, stride, padding, ceil_mode, count_include_pad, **options)
    x = _batched(input, count, "average pooling")
    geometry = Geometry(spread(kernel_size, count), spread(stride, count), spread(padding, count), (1,) * count)
    block = needed_block(x, out_shape, geometry)
    local_shape = x.dist.local_shape(out_shape)
    if 0 in local_shape:
        return DistTensor(no_outputs(block, local_shape), x.dist, out_shape)
    y = pool(block, geometry.kernel, geometry.stride, 0)
    if divisor_override is not None:
        y = y * (math.prod(geometry.kernel) / divisor_override)
    elif ceil_mode or any(geometry.padding):
        out = spatial_box(x.dist, out_shape)
        y = y * _correction(geometry, out, x.shape[2:], count_include_pad).to(y)
    return DistTensor(y, x.dist, out_shape)


def _correction(geometry: Geometry, out: Sequence[Range], extents: Sequence[int], include_pad: bool) -> torch.Tensor:
    """Window volume over the number of elements torch divides by, for each of the outputs ``out``."""
    correction = torch.ones((), dtype=torch.float64)
    for dim, ((o0, o1), extent) in enumerate(zip(out, extents, strict=True)):
        padding, kernel = geometry.padding[dim], geometry.kernel[dim]
        start = torch.arange(o0, o1) * geometry.stride[dim] - padding
        stop = (start + kernel).clamp(max=extent + padding)
        counted = stop - start if include_pad else stop.clamp(max=extent) - start.clamp(min=0)
        correction = correction.unsqueeze(-1) * (kernel / counted.double())
    return correction


def whole_space(function: Callable[..., Any], input: DistTensor, *args: Any, **kwargs: Any) -> DistTensor:
    """``function`` by gathering the spatial dimensions, applying it redundantly and splitting the result again."""
    whole = input.replicated(range(2, input.dim()))
    out_shape = result_shape(function, input, *args, **kwargs)
    local_shape = whole.dist.local_shape(out_shape)
    if 0 in whole.local.shape:
        y = no_outputs(whole.local, local_shape)
    else:
        y = function(whole.local, *args, **kwargs)
    return DistTensor(y, whole.dist, out_shape).redistribute(input.dist.balanced())


def _adaptive_avg_pool(count: int, input: DistTensor, output_size: Any) -> DistTensor:
    """``F.adaptive_avg_pool1d``, ``2d`` or ``3d``; global pooling is a mean, replicated from then on."""
    pool = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[count]
    x = _batched(input, count, "adaptive average pooling")
    out_shape = result_shape(pool, input, output_size)
    if all(n == 1 for n in out_shape[2:]):
        return mean(x, dim=tuple(range(2, x.dim())), keepdim=True)
    return whole_space(pool, x, output_size)


def _adaptive_max_pool(count: int, input: DistTensor, output_size: Any, return_indices: bool = False) -> DistTensor:
    """``F.adaptive_max_pool1d``, ``2d`` or ``3d``; gathers the spatial dimensions."""
    if return_indices:
        raise UnsupportedOperation("adaptive max pooling with return_indices=True: indices into blocks are not offered")
    pool = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}[count]
    return whole_space(pool, _batched(input, count, "adaptive max pooling"), output_size)


for _d in (1, 2, 3):
    for _name, _rule in (
        ("max_pool", _max_pool),
        ("avg_pool", _avg_pool),
        ("adaptive_avg_pool", _adaptive_avg_pool),
        ("adaptive_max_pool", _adaptive_max_pool),
    ):
        _functions = [getattr(h, f"{_name}{_d}d") for h in (F, torch, torch._C._nn) if hasattr(h, f"{_name}{_d}d")]
        implements(*_functions)(partial(_rule, _d))
