"""Max and average pooling with a halo exchange, and unpooling.

Windows may cross the borders of blocks: each rank gathers the input of its outputs, with padding, and torch pools it.
Averages are corrected for windows that reach into the padding. Unpooling gathers space.

Source: Dryden et al. 2019, III-B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from distconv.dispatch import StridePolicy, implements
from distconv.errors import NoRule, ShapeError
from distconv.kernels.convolution import Geometry, Range
from distconv.layers.common.alignment import as_distributed, redistribute_balanced, result_shape
from distconv.layers.common.empty_blocks import (
    connected_zeros,
    pad_to_minimum_shape,
    run_like_other_ranks,
    run_with_gathered_dims,
)
from distconv.layers.common.input_windows import gather_needed_input, spatial_box, to_tuple
from distconv.layers.common.value_check import check_indices
from distconv.tensor import DistTensor

Size = int | Sequence[int]
MaximaAndIndices = tuple[DistTensor, DistTensor]
"""The largest values, and the index of each in the flattened global space of its sample and channel."""

_WITH_INDICES: dict[int, Callable[..., Any]] = {
    1: F.max_pool1d_with_indices, 2: F.max_pool2d_with_indices, 3: F.max_pool3d_with_indices
}  # fmt: skip
_MAX: dict[int, Callable[..., torch.Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Callable[..., torch.Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_UNPOOL: dict[int, Callable[..., torch.Tensor]] = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}


def accept_unbatched(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that also takes x (C, [D, [H,]] W) without a sample dimension.

    Parameters
    ----------
    operator : callable
        The operator for x (N, C, [D, [H,]] W). Its first argument is the number of spatial dimensions.

    Returns
    -------
    callable
    """

    @wraps(operator)
    def either(count: int, input: DistTensor, *args: Any, **kwargs: Any) -> Any:
        if input.dim() != count + 1:
            return operator(count, input, *args, **kwargs)
        pooled = operator(count, input.unsqueeze(0), *args, **kwargs)
        return tuple(t.squeeze(0) for t in pooled) if isinstance(pooled, tuple) else pooled.squeeze(0)

    return either


# -- windows of one size ----------------------------------------------------------------------------------------------


class _Pooling(NamedTuple):
    """One pooling on this rank: the gathered input and the shape of the result."""

    block: torch.Tensor
    """The gathered input of this rank's outputs, with the padding that torch's kernel does not add."""
    geometry: Geometry
    x: DistTensor
    """The input."""
    out_shape: torch.Size
    """Global shape of the result."""
    padding: tuple[int, ...]
    """Padding that torch's kernel adds to ``block``."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's block of the result."""
        return self.x.dist.local_shape(self.out_shape)

    def pool_input(self) -> torch.Tensor:
        """Return the input to pool; on a rank without outputs it is padded to one window."""
        if 0 not in self.local_shape:
            return self.block
        return pad_to_minimum_shape(self.block, (1, 1, *map(self.geometry.reach, range(len(self.geometry.kernel)))))

    def crop_outputs(self, y: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs: on a rank without outputs, without those of the padded window."""
        return connected_zeros(y, self.local_shape) if 0 in self.local_shape else y

    def wrap(self, y: torch.Tensor) -> DistTensor:
        """Return the DistTensor whose block on this rank is ``y``."""
        return DistTensor(y, self.x.dist, self.out_shape)


def lowest_value(dtype: torch.dtype) -> float:
    """Return the smallest value of a dtype, which never wins a maximum.

    Parameters
    ----------
    dtype : torch.dtype
        Floating-point or integer.

    Returns
    -------
    float
        Minus infinity for a floating-point dtype.
    """
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _prepare(
    count: int,
    input: DistTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
) -> _Pooling:
    """Gather the input of this rank's outputs. Collective."""
    stride = kernel_size if stride is None or stride in ((), []) else stride
    out_shape = result_shape(_MAX[count], input, kernel_size, stride, padding, dilation, ceil_mode)
    x = redistribute_balanced(input)
    geometry = Geometry(
        to_tuple(kernel_size, count), to_tuple(stride, count), to_tuple(padding, count), to_tuple(dilation, count)
    )
    padding = _kernel_padding(geometry, spatial_box(x.dist, out_shape), x.shape[2:])
    unpadded = [dim for dim, size in enumerate(padding) if size]
    block = gather_needed_input(x, out_shape, geometry, lowest_value(x.dtype), unpadded=unpadded)
    return _Pooling(block, geometry, x, out_shape, padding)


def _kernel_padding(geometry: Geometry, out: Sequence[Range], extents: Sequence[int]) -> tuple[int, ...]:
    """Return the padding of each dimension that torch's kernel can add, which saves a copy of the input.

    The kernel pads both ends by the same number. If the rank's outputs do not begin with the first one, or the kernel
    would compute more outputs, the input has to contain the padding.
    """
    if any(first >= last for first, last in out):
        return (0,) * len(out)
    added = []
    for dim, ((first, last), extent) in enumerate(zip(out, extents, strict=True)):
        padding, (start, stop) = geometry.padding[dim], geometry.needed(dim, (first, last))
        inside = min(stop, extent) - max(start, 0)
        outputs = (inside + 2 * padding - geometry.reach(dim)) // geometry.stride[dim] + 1
        added.append(padding if first == 0 and outputs == last else 0)
    return tuple(added)


@accept_unbatched
def max_pool(count: int, input: DistTensor, *args: Any, return_indices: bool = False, **kwargs: Any) -> Any:
    """Compute ``F.max_pool1d``, ``2d`` or ``3d`` of x (N, C, [D, [H,]] W).

    Parameters
    ----------
    count : int
        Number of spatial dimensions.
    input : DistTensor
    *args, return_indices, **kwargs
        As in torch.

    Returns
    -------
    DistTensor or tuple of DistTensor
        The largest values. With ``return_indices`` also their indices in the flattened global space.
    """
    if return_indices:
        return max_pool_with_indices(count, input, *args, **kwargs)
    pooling = _prepare(count, input, *args, **kwargs)
    geometry = pooling.geometry
    y = _MAX[count](pooling.pool_input(), geometry.kernel, geometry.stride, pooling.padding, geometry.dilation)
    return pooling.wrap(pooling.crop_outputs(y))


@accept_unbatched
def max_pool_with_indices(
    count: int, input: DistTensor, *args: Any, return_indices: bool = True, **kwargs: Any
) -> MaximaAndIndices:
    """Compute ``F.max_pool1d_with_indices``, ``2d`` or ``3d`` of x (N, C, [D, [H,]] W).

    Parameters
    ----------
    count : int
        Number of spatial dimensions.
    input : DistTensor
    *args, **kwargs
        As in torch.
    return_indices : bool
        Ignored.

    Returns
    -------
    tuple of DistTensor
        The largest values, and their indices (int64) in the flattened global space of each sample and channel.
    """
    pooling = _prepare(count, input, *args, **kwargs)
    geometry = pooling.geometry
    window = (geometry.kernel, geometry.stride, pooling.padding, geometry.dilation)
    y, indices = _WITH_INDICES[count](pooling.pool_input(), *window)
    return pooling.wrap(pooling.crop_outputs(y)), pooling.wrap(
        _to_global_indices(pooling.crop_outputs(indices), pooling)
    )


def _to_global_indices(at: torch.Tensor, pooling: _Pooling) -> torch.Tensor:
    """Return flat indices into the global space, given flat indices into the gathered block."""
    indices = torch.zeros_like(at)
    volume = 1
    for dim in reversed(range(len(pooling.geometry.kernel))):
        extent, out = max(1, pooling.block.shape[dim + 2]), spatial_box(pooling.x.dist, pooling.out_shape)[dim]
        # torch's index refers to the gathered block with its halo; shift it to the global position, dimension by
        # dimension.
        index = at % extent + pooling.geometry.needed(dim, out)[0] + pooling.padding[dim]
        # If all elements are -inf, torch returns the index of the first element that is not padding.
        index = torch.where(index < 0, index % pooling.geometry.dilation[dim], index)
        at = at // extent
        indices += volume * index
        volume *= pooling.x.shape[dim + 2]
    return indices


@accept_unbatched
def avg_pool(
    count: int,
    input: DistTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> DistTensor:
    """Compute ``F.avg_pool1d``, ``2d`` or ``3d`` of x (N, C, [D, [H,]] W).

    Integers are gathered along space, because torch divides them as integers.

    Parameters
    ----------
    count : int
        Number of spatial dimensions.
    input : DistTensor
    kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        As in torch.

    Returns
    -------
    DistTensor
    """
    stride = kernel_size if stride is None or stride in ((), []) else stride
    pool = _AVERAGE[count]
    options = {} if divisor_override is None else {"divisor_override": divisor_override}
    window = (kernel_size, stride, padding, ceil_mode, count_include_pad)
    out_shape = result_shape(pool, input, *window, **options)
    if not input.is_floating_point():  # torch divides integers as integers
        return run_with_gathered_dims(
            lambda block: pool(block, *window, **options), input, range(2, input.dim()), out_shape
        )
    x = redistribute_balanced(input)
    geometry = Geometry(to_tuple(kernel_size, count), to_tuple(stride, count), to_tuple(padding, count), (1,) * count)
    pooling = _Pooling(gather_needed_input(x, out_shape, geometry), geometry, x, out_shape, (0,) * count)
    y = pooling.crop_outputs(pool(pooling.pool_input(), geometry.kernel, geometry.stride, pooling.padding))
    if divisor_override is not None:
        # The local pooling divided by the full kernel.
        y = y * (math.prod(geometry.kernel) / divisor_override)
    # Where a window reaches beyond the input or the padding, torch divides by fewer elements.
    elif ceil_mode or any(geometry.padding):
        out = spatial_box(x.dist, out_shape)
        y = y * _divisor_correction(geometry, out, x.shape[2:], count_include_pad).to(y)
    return DistTensor(y, x.dist, out_shape)


def _divisor_correction(
    geometry: Geometry, out: Sequence[Range], extents: Sequence[int], include_pad: bool
) -> torch.Tensor:
    """Return, for each output in ``out``, the window's volume divided by the number by which torch divides."""
    correction = torch.ones((), dtype=torch.float64)
    for dim, ((o0, o1), extent) in enumerate(zip(out, extents, strict=True)):
        padding, kernel = geometry.padding[dim], geometry.kernel[dim]
        start = torch.arange(o0, o1) * geometry.stride[dim] - padding
        stop = (start + kernel).clamp(max=extent + padding)
        counted = stop - start if include_pad else stop.clamp(max=extent) - start.clamp(min=0)
        correction = correction.unsqueeze(-1) * (kernel / counted.double())
    return correction


def _max_unpool(
    count: int,
    input: DistTensor,
    indices: torch.Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    output_size: Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute ``F.max_unpool1d``, ``2d`` or ``3d`` with space gathered, because a value may go to any position."""
    unpool = _UNPOOL[count]
    size = None if output_size is None else tuple(output_size)
    out_shape = result_shape(unpool, input, indices, kernel_size, stride, padding, size)
    if input.dim() == count + 1:
        return unpool(input.unsqueeze(0), indices.unsqueeze(0), kernel_size, stride, padding, size).squeeze(0)
    # Samples and channels stay split.
    target = input.dist.balanced()
    gathered = target.replicate(range(2, count + 2))
    values, at = (as_distributed(t, input.grid).redistribute(gathered) for t in (input, indices))
    volume = math.prod(out_shape[2:])
    message = f"max unpooling: found an invalid max index: {{}} (output volumes are of {volume})"
    check_indices(at.local, volume, at.grid, lambda index: ShapeError(message.format(index)))
    unpooled = partial(unpool, kernel_size=kernel_size, stride=stride, padding=padding, output_size=size)
    y = run_like_other_ranks(unpooled, gathered.local_shape(out_shape), values.local, at.local)
    return DistTensor(y, gathered, out_shape).redistribute(target)


def _raise_fractional(*args: Any, **kwargs: Any) -> None:
    """Raise NoRule for fractional max pooling."""
    raise NoRule(
        "fractional max pooling has no distributed rule, because it draws random windows for each sample and channel; "
        "apply it to the gathered tensor and scatter the result "
        "(dc.scatter(F.fractional_max_pool2d(dc.gather(x), ...), x.dist)), or use adaptive max pooling"
    )


# -- registration -----------------------------------------------------------------------------------------------------


def _register(name: str, operator: Callable[..., Any], count: int) -> None:
    """Register ``operator`` for the functions called ``name``, of ``count`` spatial dimensions."""
    functions = [getattr(module, name) for module in (F, torch, torch._C._nn) if hasattr(module, name)]
    implements(*functions)(partial(operator, count))


for _count in (1, 2, 3):
    _register(f"max_pool{_count}d", max_pool, _count)
    _register(f"max_pool{_count}d_with_indices", max_pool_with_indices, _count)
    _register(f"avg_pool{_count}d", avg_pool, _count)
    # Not torch._C._nn's functions of the same name, whose third argument is the output size.
    # Meta tensors give a contiguous result. The CPU's kernel of two dimensions keeps the memory format.
    _order = StridePolicy.OF_INPUT_ON_CPU if _count == 2 else StridePolicy.KEPT
    implements(getattr(F, f"max_unpool{_count}d"), tensors="input indices", order=_order)(partial(_max_unpool, _count))

for _count in (2, 3):
    _register(f"fractional_max_pool{_count}d", _raise_fractional, _count)
    _register(f"fractional_max_pool{_count}d_with_indices", _raise_fractional, _count)
