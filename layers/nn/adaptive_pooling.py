"""Adaptive pooling: the windows divide the input into a given number of parts.

Windows may differ in size. The dimensions are reduced one after the other, from the last to the first. So of equal
largest values the first one in the order of the full window wins, as in torch. A rank gathers only the windows of its
own outputs. A dimension of one output is replicated from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from distconv.dispatch import implements
from distconv.errors import NoRule
from distconv.kernels.convolution import Range
from distconv.layers.common.alignment import redistribute_balanced, result_shape, to_probed_dtype
from distconv.layers.common.input_windows import gather_needed_input, spatial_box
from distconv.layers.math.reductions import mean
from distconv.layers.nn.pooling import accept_unbatched, avg_pool, lowest_value, max_pool
from distconv.tensor import DistTensor

_AVERAGE: dict[int, Callable[..., torch.Tensor]] = {
    1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d
}  # fmt: skip
_MAX: dict[int, Callable[..., torch.Tensor]] = {
    1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d
}  # fmt: skip


@dataclass(frozen=True)
class _AdaptiveWindows:
    """The windows along dimension ``dim``, which has ``extent`` inputs and ``outputs`` outputs."""

    dim: int
    extent: int
    outputs: int

    def window(self, index: int) -> Range:
        """Return the range of inputs of output ``index``."""
        return index * self.extent // self.outputs, -(-(index + 1) * self.extent // self.outputs)

    def needed(self, dim: int, out: Range) -> Range:
        """Return the range of inputs of the outputs ``out``; other dimensions are unchanged."""
        if dim + 2 != self.dim or out[0] >= out[1]:
            return out
        return self.window(out[0])[0], self.window(out[1] - 1)[1]

    @property
    def longest_window(self) -> int:
        """Size of the largest window."""
        return max(stop - start for start, stop in map(self.window, range(self.outputs)))


class _GatheredWindows(NamedTuple):
    """The windows of this rank's outputs along one dimension.

    ``values`` has the elements of each window in an additional dimension after the pooled one. ``positions`` (windows,
    longest) are the global indices of these elements; shorter windows repeat their last element.
    """

    values: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    """Number of elements of each window, (windows,)."""
    x: DistTensor
    """The input."""
    shape: torch.Size
    """Global shape of the result."""

    def wrap(self, y: torch.Tensor) -> DistTensor:
        """Return the DistTensor whose block on this rank is ``y``."""
        return DistTensor(y, self.x.dist, self.shape)


def _gather_windows(x: DistTensor, dim: int, outputs: int) -> _GatheredWindows:
    """Gather the windows of this rank's outputs along ``dim``. Collective."""
    windows = _AdaptiveWindows(dim, x.shape[dim], outputs)
    shape = torch.Size([*x.shape[:dim], outputs, *x.shape[dim + 1 :]])
    block = gather_needed_input(x, shape, windows)
    out = spatial_box(x.dist, shape)[dim - 2]
    edges = torch.tensor([windows.window(i) for i in range(*out)], dtype=torch.int64, device=block.device).view(-1, 2)
    positions = torch.minimum(
        edges[:, :1] + torch.arange(windows.longest_window, device=block.device), edges[:, 1:] - 1
    )
    # Windows differ in length by at most a few elements. As rows of the longest length they are reduced by one call.
    start = windows.needed(dim - 2, out)[0]
    values = block.index_select(dim, (positions - start).flatten()).unflatten(dim, positions.shape)
    return _GatheredWindows(values, positions, edges[:, 1] - edges[:, 0], x, shape)


# -- averages ---------------------------------------------------------------------------------------------------------


def _average_windows(x: DistTensor, dim: int, outputs: int) -> DistTensor:
    """Return the averages of the windows along ``dim``. Collective."""
    windows = _gather_windows(x, dim, outputs)
    trailing = (1,) * (x.dim() - dim - 1)
    values = windows.values
    # Repeated last elements must not count. A maximum does not change by them.
    if x.shape[dim] % outputs:
        repeats = torch.arange(values.shape[dim + 1], device=values.device) >= windows.lengths.view(-1, 1)
        values = values.masked_fill(repeats.view(*repeats.shape, *trailing), 0)
    return windows.wrap(values.sum(dim + 1) / windows.lengths.view(-1, *trailing))


@accept_unbatched
def _adaptive_avg_pool(count: int, input: DistTensor, output_size: Any) -> Any:
    """Compute ``F.adaptive_avg_pool1d``, ``2d`` or ``3d``; dimensions of one output are a mean."""
    outputs = _output_sizes(_AVERAGE[count], input, output_size)
    x = to_probed_dtype(redistribute_balanced(input), lambda block: _AVERAGE[count](block, 1), *(1,) * (count + 2))
    # 1. Dimensions of one output need no gathered windows, but a sum over ranks. 2. Windows of one size are ordinary
    # pooling. 3. Otherwise dimension by dimension: a window is a product of ranges, so the mean of means is its mean.
    single = [dim for dim, n in enumerate(outputs, 2) if n == 1]
    if single:
        x = mean(x, dim=single, keepdim=True)
        if x.shape[2:] == outputs:
            return x
    kernel = _uniform_kernel(x, outputs)
    if kernel is not None:
        return avg_pool(count, x, kernel)
    for dim, n in enumerate(outputs, 2):
        if n != x.shape[dim]:
            x = _average_windows(x, dim, n)
    return x


def _output_sizes(function: Callable[..., torch.Tensor], input: DistTensor, output_size: Any) -> torch.Size:
    """Return the spatial shape of the result.

    Raises
    ------
    NoRule
        If a dimension has no outputs, because torch has no gradient then.
    """
    outputs = result_shape(function, input, output_size)[2:]
    if 0 in outputs:
        raise NoRule(
            f"adaptive pooling to {tuple(outputs)}, which has no elements, has no distributed rule: use sizes of 1 "
            "or more"
        )
    return outputs


def _uniform_kernel(x: DistTensor, outputs: Sequence[int]) -> tuple[int, ...] | None:
    """Return the sizes of the windows if all of them have the same size and none overlaps another."""
    if any(extent % n for extent, n in zip(x.shape[2:], outputs, strict=True)):
        return None
    return tuple(extent // n for extent, n in zip(x.shape[2:], outputs, strict=True))


# -- largest values ---------------------------------------------------------------------------------------------------


class _PartialMaxima(NamedTuple):
    """The largest values so far and, on request, their indices in the dimensions that are already reduced."""

    values: DistTensor
    indices: DistTensor | None


def _max_over_windows(partial: _PartialMaxima, dim: int, outputs: int, volume: int) -> _PartialMaxima:
    """Reduce ``dim`` to the largest value of each window.

    Consecutive indices of ``dim`` are ``volume`` elements of the input apart.
    """
    windows = _gather_windows(partial.values, dim, outputs)
    y, at = windows.values.max(dim + 1)
    if partial.indices is None:
        return _PartialMaxima(windows.wrap(y), None)
    at = at.unsqueeze(dim + 1)
    steps = windows.positions.view(*windows.positions.shape, *(1,) * (y.dim() - dim - 1)).expand(windows.values.shape)
    earlier = _gather_windows(partial.indices, dim, outputs).values.gather(dim + 1, at)
    indices = (earlier + volume * steps.gather(dim + 1, at)).squeeze(dim + 1)
    return _PartialMaxima(windows.wrap(y), windows.wrap(indices))


def _max_over_split_dim(partial: _PartialMaxima, dim: int, volume: int) -> _PartialMaxima:
    """Reduce the split dimension ``dim`` to one element: the maximum of the ranks' maxima. Collective."""
    x, axis = partial.values, partial.values.dist.split[dim]
    assert axis is not None
    # Blocks without elements come last along the axis, so the lowest value that stands for them never wins a tie.
    y, at = _pad_empty_dim(x.local, dim, lowest_value(x.dtype)).max(dim, keepdim=True)
    shape = torch.Size([*x.shape[:dim], x.grid.shape[axis], *x.shape[dim + 1 :]])
    # One candidate of each rank, in the order of ranks, so that max takes the first one of equal values.
    candidates = DistTensor(y, x.dist, shape).replicated([dim])
    y, winner = candidates.local.max(dim, keepdim=True)
    shape = torch.Size([*shape[:dim], 1, *shape[dim + 1 :]])
    values = DistTensor(y, candidates.dist, shape)
    if partial.indices is None:
        return _PartialMaxima(values, None)
    own_indices = _pad_empty_dim(partial.indices.local, dim, 0).gather(dim, at) + volume * (x.box()[dim].start + at)
    all_indices = DistTensor(own_indices, x.dist, candidates.shape).replicated([dim]).local
    return _PartialMaxima(values, DistTensor(all_indices.gather(dim, winner), candidates.dist, shape))


def _pad_empty_dim(block: torch.Tensor, dim: int, value: float) -> torch.Tensor:
    """Return ``block``, or one element of ``value`` along ``dim`` if it has none."""
    if block.shape[dim]:
        return block
    return torch.cat([block, block.new_full([*block.shape[:dim], 1, *block.shape[dim + 1 :]], value)], dim)


@accept_unbatched
def _adaptive_max_pool(count: int, input: DistTensor, output_size: Any, return_indices: bool = False) -> Any:
    """Compute ``F.adaptive_max_pool1d``, ``2d`` or ``3d``; indices are as in max pooling."""
    outputs = _output_sizes(_MAX[count], input, output_size)
    x = to_probed_dtype(redistribute_balanced(input), lambda block: _MAX[count](block, 1), *(1,) * (count + 2))
    kernel = _uniform_kernel(x, outputs)
    # With one output of a split dimension, one rank would gather all of it. The maxima of the ranks are much smaller.
    if kernel is not None and not any(n == 1 and axis for n, axis in zip(outputs, x.dist.split[2:], strict=True)):
        return max_pool(count, x, kernel, return_indices=return_indices)
    zeros = DistTensor(torch.zeros_like(x.local, dtype=torch.int64), x.dist, x.shape) if return_indices else None
    largest = _PartialMaxima(x, zeros)
    for dim in reversed(range(2, x.dim())):
        volume = math.prod(x.shape[dim + 1 :])
        if outputs[dim - 2] == 1 and x.dist.split[dim] is not None:
            largest = _max_over_split_dim(largest, dim, volume)
        # Indices must be computed also along a dimension that keeps its size.
        elif return_indices or outputs[dim - 2] != x.shape[dim]:
            largest = _max_over_windows(largest, dim, outputs[dim - 2], volume)
    return tuple(largest) if return_indices else largest.values


def _adaptive_max_pool_with_indices(
    count: int, input: DistTensor, output_size: Any, return_indices: bool = True
) -> Any:
    """Compute adaptive max pooling for functions of torch that always return indices."""
    return _adaptive_max_pool(count, input, output_size, return_indices=True)


# -- registration -----------------------------------------------------------------------------------------------------


def _builtins(name: str) -> list[Any]:
    return [getattr(module, name) for module in (torch, torch._C._nn) if hasattr(module, name)]


for _count in (1, 2, 3):
    _average, _max = f"adaptive_avg_pool{_count}d", f"adaptive_max_pool{_count}d"
    implements(getattr(F, _average), *_builtins(_average))(partial(_adaptive_avg_pool, _count))
    implements(getattr(F, _max))(partial(_adaptive_max_pool, _count))
    implements(getattr(F, f"{_max}_with_indices"), *_builtins(_max))(partial(_adaptive_max_pool_with_indices, _count))
