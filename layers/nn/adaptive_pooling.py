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
from distconv.layers.common.alignment import as_cast_for, balanced_input, result_shape
from distconv.layers.common.input_windows import needed_block, spatial_box
from distconv.layers.math.reductions import mean
from distconv.layers.nn.pooling import avg_pool, lowest, max_pool, unbatched
from distconv.tensor import DistTensor

_AVERAGE: dict[int, Callable[..., torch.Tensor]] = {
    1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d
}  # fmt: skip
_MAX: dict[int, Callable[..., torch.Tensor]] = {
    1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d
}  # fmt: skip


@dataclass(frozen=True)
class _Adaptive:
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
    def longest(self) -> int:
        """Size of the largest window."""
        return max(stop - start for start, stop in map(self.window, range(self.outputs)))


class _Windows(NamedTuple):
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

    def result(self, y: torch.Tensor) -> DistTensor:
        """Return the DistTensor whose block on this rank is ``y``."""
        return DistTensor(y, self.x.dist, self.shape)


def _windows(x: DistTensor, dim: int, outputs: int) -> _Windows:
    """Gather the windows of this rank's outputs along ``dim``. Collective."""
    rule = _Adaptive(dim, x.shape[dim], outputs)
    shape = torch.Size([*x.shape[:dim], outputs, *x.shape[dim + 1 :]])
    block = needed_block(x, shape, rule)
    own = spatial_box(x.dist, shape)[dim - 2]
    edges = torch.tensor([rule.window(i) for i in range(*own)], dtype=torch.int64, device=block.device).view(-1, 2)
    positions = torch.minimum(edges[:, :1] + torch.arange(rule.longest, device=block.device), edges[:, 1:] - 1)
    start = rule.needed(dim - 2, own)[0]
    values = block.index_select(dim, (positions - start).flatten()).unflatten(dim, positions.shape)
    return _Windows(values, positions, edges[:, 1] - edges[:, 0], x, shape)


# -- averages ---------------------------------------------------------------------------------------------------------


def _averages(x: DistTensor, dim: int, outputs: int) -> DistTensor:
    """Return the averages of the windows along ``dim``. Collective."""
    windows = _windows(x, dim, outputs)
    behind = (1,) * (x.dim() - dim - 1)
    values = windows.values
    if x.shape[dim] % outputs:
        repeats = torch.arange(values.shape[dim + 1], device=values.device) >= windows.lengths.view(-1, 1)
        values = values.masked_fill(repeats.view(*repeats.shape, *behind), 0)
    return windows.result(values.sum(dim + 1) / windows.lengths.view(-1, *behind))


@unbatched
def _adaptive_avg_pool(count: int, input: DistTensor, output_size: Any) -> Any:
    """Compute ``F.adaptive_avg_pool1d``, ``2d`` or ``3d``; dimensions of one output are a mean."""
    outputs = _outputs(_AVERAGE[count], input, output_size)
    x = as_cast_for(balanced_input(input), lambda block: _AVERAGE[count](block, 1), *(1,) * (count + 2))
    single = [dim for dim, n in enumerate(outputs, 2) if n == 1]
    if single:
        x = mean(x, dim=single, keepdim=True)
        if x.shape[2:] == outputs:
            return x
    kernel = _kernel(x, outputs)
    if kernel is not None:
        return avg_pool(count, x, kernel)
    for dim, n in enumerate(outputs, 2):
        if n != x.shape[dim]:
            x = _averages(x, dim, n)
    return x


def _outputs(function: Callable[..., torch.Tensor], input: DistTensor, output_size: Any) -> torch.Size:
    """Return the spatial shape of the result.

    Raises
    ------
    NoRule
        If a dimension has no outputs, because torch has no gradient then.
    """
    outputs = result_shape(function, input, output_size)[2:]
    if 0 in outputs:
        raise NoRule(f"adaptive pooling to {tuple(outputs)}, which has no elements: give each dimension one or more")
    return outputs


def _kernel(x: DistTensor, outputs: Sequence[int]) -> tuple[int, ...] | None:
    """Return the sizes of the windows if all of them have the same size and none overlaps another."""
    if any(extent % n for extent, n in zip(x.shape[2:], outputs, strict=True)):
        return None
    return tuple(extent // n for extent, n in zip(x.shape[2:], outputs, strict=True))


# -- largest values ---------------------------------------------------------------------------------------------------


class _Largest(NamedTuple):
    """The largest values so far and, on request, their indices in the dimensions that are already reduced."""

    values: DistTensor
    indices: DistTensor | None


def _maxima(so_far: _Largest, dim: int, outputs: int, volume: int) -> _Largest:
    """Reduce ``dim`` to the largest value of each window.

    Consecutive indices of ``dim`` are ``volume`` elements of the input apart.
    """
    windows = _windows(so_far.values, dim, outputs)
    y, at = windows.values.max(dim + 1)
    if so_far.indices is None:
        return _Largest(windows.result(y), None)
    at = at.unsqueeze(dim + 1)
    steps = windows.positions.view(*windows.positions.shape, *(1,) * (y.dim() - dim - 1)).expand(windows.values.shape)
    earlier = _windows(so_far.indices, dim, outputs).values.gather(dim + 1, at)
    indices = (earlier + volume * steps.gather(dim + 1, at)).squeeze(dim + 1)
    return _Largest(windows.result(y), windows.result(indices))


def _maximum(so_far: _Largest, dim: int, volume: int) -> _Largest:
    """Reduce the split dimension ``dim`` to one element: the maximum of the ranks' maxima. Collective."""
    x, axis = so_far.values, so_far.values.dist.split[dim]
    assert axis is not None
    # Blocks without elements come last along the axis, so the lowest value that stands for them never wins a tie.
    y, at = _never_empty(x.local, dim, lowest(x.dtype)).max(dim, keepdim=True)
    shape = torch.Size([*x.shape[:dim], x.grid.shape[axis], *x.shape[dim + 1 :]])
    candidates = DistTensor(y, x.dist, shape).replicated([dim])
    y, winner = candidates.local.max(dim, keepdim=True)
    shape = torch.Size([*shape[:dim], 1, *shape[dim + 1 :]])
    values = DistTensor(y, candidates.dist, shape)
    if so_far.indices is None:
        return _Largest(values, None)
    here = _never_empty(so_far.indices.local, dim, 0).gather(dim, at) + volume * (x.box()[dim].start + at)
    theirs = DistTensor(here, x.dist, candidates.shape).replicated([dim]).local
    return _Largest(values, DistTensor(theirs.gather(dim, winner), candidates.dist, shape))


def _never_empty(block: torch.Tensor, dim: int, value: float) -> torch.Tensor:
    """Return ``block``, or one element of ``value`` along ``dim`` if it has none."""
    if block.shape[dim]:
        return block
    return torch.cat([block, block.new_full([*block.shape[:dim], 1, *block.shape[dim + 1 :]], value)], dim)


@unbatched
def _adaptive_max_pool(count: int, input: DistTensor, output_size: Any, return_indices: bool = False) -> Any:
    """Compute ``F.adaptive_max_pool1d``, ``2d`` or ``3d``; indices are as in max pooling."""
    outputs = _outputs(_MAX[count], input, output_size)
    x = as_cast_for(balanced_input(input), lambda block: _MAX[count](block, 1), *(1,) * (count + 2))
    kernel = _kernel(x, outputs)
    if kernel is not None and not any(n == 1 and axis for n, axis in zip(outputs, x.dist.split[2:], strict=True)):
        return max_pool(count, x, kernel, return_indices=return_indices)
    nowhere = DistTensor(torch.zeros_like(x.local, dtype=torch.int64), x.dist, x.shape) if return_indices else None
    largest = _Largest(x, nowhere)
    for dim in reversed(range(2, x.dim())):
        volume = math.prod(x.shape[dim + 1 :])
        if outputs[dim - 2] == 1 and x.dist.split[dim] is not None:
            largest = _maximum(largest, dim, volume)
        elif return_indices or outputs[dim - 2] != x.shape[dim]:
            largest = _maxima(largest, dim, outputs[dim - 2], volume)
    return tuple(largest) if return_indices else largest.values


def _with_indices(count: int, input: DistTensor, output_size: Any, return_indices: bool = True) -> Any:
    """Compute adaptive max pooling for functions of torch that always return indices."""
    return _adaptive_max_pool(count, input, output_size, return_indices=True)


for _d in (1, 2, 3):
    _builtins = [h for h in (torch, torch._C._nn) if hasattr(h, f"adaptive_max_pool{_d}d")]
    implements(getattr(F, f"adaptive_max_pool{_d}d"))(partial(_adaptive_max_pool, _d))
    implements(
        getattr(F, f"adaptive_max_pool{_d}d_with_indices"), *(getattr(h, f"adaptive_max_pool{_d}d") for h in _builtins)
    )(partial(_with_indices, _d))
    _average = f"adaptive_avg_pool{_d}d"
    implements(*(getattr(h, _average) for h in (F, torch, torch._C._nn) if hasattr(h, _average)))(
        partial(_adaptive_avg_pool, _d)
    )
