"""Slices and chunks of a tensor along its dimensions.

A slice is a view: each rank keeps what it owns of the slice, and nothing moves. The blocks of the result are balanced
again by operators that require balanced blocks, such as convolution. Flips, rolls and windows exchange only the indices
that change their owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from distconv.communication.collectives import gather_region
from distconv.communication.routes import Needs
from distconv.communication.transfer import transfer_plan
from distconv.dispatch import OperatorKind, StridePolicy, implements
from distconv.distribution import Distribution, Interval
from distconv.grid import cached_on_grid
from distconv.layers.common.alignment import result_shape
from distconv.layers.common.block_edges import (
    balanced_edges,
    boundaries_and_cyclic,
    distribution_from_edges,
    edges_of,
    gather_cyclic_dims,
)
from distconv.layers.common.inplace_views import (
    ViewResult,
    record_copied_view,
    record_multi_view,
    record_shared_view,
    takes_view,
)
from distconv.layers.common.input_windows import empty_output
from distconv.layers.tensor.joining import cat
from distconv.layers.tensor.reshaping import reshape, sizes_from_arguments
from distconv.tensor import DistTensor

ALL = slice(None)
"""The slice ``:``."""


@takes_view(lambda changed, input, slices: input.__setitem__(tuple(slices), changed))
def slice_dims(input: DistTensor, slices: Sequence[slice]) -> ViewResult:
    """Return a slice of a tensor as a view, in which every rank keeps the indices that it owns.

    Collective: call on every rank. Only block-cyclic dimensions that are cut are gathered.

    Parameters
    ----------
    input : DistTensor
    slices : sequence of slice
        One for each dimension.

    Returns
    -------
    DistTensor
    """
    ranges = tuple(range(*s.indices(n)) for s, n in zip(slices, input.shape, strict=True))
    x = gather_cyclic_dims(input, [d for d, (r, n) in enumerate(zip(ranges, input.shape, strict=True)) if len(r) != n])
    own, dist = _plan_slice(x.dist, x.dist.axes, x.shape, ranges)
    return DistTensor(x.local[own], dist, torch.Size(len(r) for r in ranges)), x


@cached_on_grid
def _plan_slice(
    dist: Distribution, axes: tuple[str | None, ...], shape: torch.Size, ranges: tuple[range, ...]
) -> tuple[tuple[slice, ...], Distribution]:
    """Return the slices of this rank's block, and the distribution of the result, for ranges of the global tensor."""
    edges, cyclic = boundaries_and_cyclic(dist, axes)
    own = []
    for dim, wanted in enumerate(ranges):
        axis = dist.split[dim]
        if wanted == range(shape[dim]):
            own.append(ALL)
        elif axis is None:
            own.append(slice(wanted.start, wanted.stop, wanted.step))
        else:
            old = edges_of(dist, dim, shape[dim])
            # Index o of the result is start + o * step of the input. Count the results before each edge.
            new = tuple(min(max(0, -((wanted.start - e) // wanted.step)), len(wanted)) for e in old)
            edges[axis] = new
            index = dist.coordinate(dim)
            taken = wanted[new[index] : new[index + 1]]
            # The slice within the block; an empty one where this rank has no index of the result.
            begin = old[index]
            own.append(slice(taken[0] - begin, taken[-1] + 1 - begin, wanted.step) if taken else slice(0, 0))
    return tuple(own), distribution_from_edges(dist.grid, axes, edges, cyclic)


def slice_dim(input: DistTensor, dim: int, start: int, stop: int) -> DistTensor:
    """Return a range of indices of one dimension as a view.

    Parameters
    ----------
    input : DistTensor
    dim : int
    start, stop : int
        Global indices.

    Returns
    -------
    DistTensor
    """
    slices = [ALL] * input.dim()
    slices[dim] = slice(start, stop)
    return slice_dims(input, slices)


@implements(torch.narrow, torch.Tensor.narrow, kind=OperatorKind.VIEW, order=StridePolicy.NEW)
def narrow(input: DistTensor, dim: int, start: int, length: int) -> DistTensor:
    """Compute ``torch.narrow`` as a slice.

    Parameters
    ----------
    input, dim, start, length
        As in ``torch.narrow``.

    Returns
    -------
    DistTensor
    """
    start = int(start)
    result_shape(torch.narrow, input, dim, start, length)
    start += input.shape[dim] if start < 0 else 0
    return slice_dim(input, dim, start, start + length)


@implements(torch.select, torch.Tensor.select, kind=OperatorKind.VIEW, order=StridePolicy.NEW)
def select(input: DistTensor, dim: int, index: int) -> DistTensor:
    """Compute ``torch.select``; the result is replicated over the axis that splits ``dim``.

    Parameters
    ----------
    input, dim, index
        As in ``torch.select``.

    Returns
    -------
    DistTensor
    """
    result_shape(torch.select, input, dim, index)
    selected: DistTensor = input[(ALL,) * (dim % input.dim()) + (index,)]  # type: ignore[assignment]
    return selected


@implements(torch.unbind, torch.Tensor.unbind, kind=OperatorKind.VIEW, order=StridePolicy.NEW)
def unbind(input: DistTensor, dim: int = 0) -> tuple[DistTensor, ...]:
    """Compute ``torch.unbind``; a split ``dim`` is gathered.

    Parameters
    ----------
    input, dim
        As in ``torch.unbind``.

    Returns
    -------
    tuple of DistTensor
    """
    shape = result_shape(_first_unbound, input, dim)
    dim %= input.dim()
    # Each result is one index of the dimension, which a single rank would own alone.
    x = input.replicated([dim])
    dist = x.dist.with_axes([*x.dist.axes[:dim], *x.dist.axes[dim + 1 :]])
    results = [DistTensor(local, dist, shape) for local in x.local.unbind(dim)]
    if x is input:
        return tuple(record_shared_view(r, input, partial(select, input, dim, i)) for i, r in enumerate(results))
    return tuple(_record_unbound(r, input, dim, i) for i, r in enumerate(results))


def _record_unbound(result: DistTensor, input: DistTensor, dim: int, i: int) -> DistTensor:
    """Record ``result`` as a moved view of index ``i`` of ``dim``."""
    # Without autograd a change is written back; while autograd records, record_multi_view replaces this by an error.
    retake = partial(select, input, dim, i)
    at = (ALL,) * dim + (i,)
    view = record_copied_view(result, input, retake, lambda r: input.__setitem__(at, r))
    return record_multi_view(view, input, retake, "unbind")


def _first_unbound(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    parts = tensor.unbind(dim)
    return parts[0] if parts else tensor


# -- division into chunks ---------------------------------------------------------------------------------------------


def _divide(function: Any, input: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Call a function that divides one dimension into chunks; their ranges follow from its result for a meta tensor."""
    args = tuple(a.gather() if isinstance(a, DistTensor) else a for a in args)
    named = {name: a.gather() if isinstance(a, DistTensor) else a for name, a in named.items()}
    if not isinstance(input, DistTensor):
        chunks: tuple[torch.Tensor, ...] = function(input, *args, **named)
        return chunks
    with torch._C.DisableTorchFunctionSubclass():
        parts = function(torch.empty(input.shape, device="meta"), *args, **named)
    # A single chunk is the full tensor, in which no dimension is divided.
    dims = [d for d, n in enumerate(input.shape) if any(p.shape[d] != n for p in parts)]
    if not dims:
        takes = [partial(slice_dims, input, [ALL] * input.dim())] * len(parts)
    else:
        (dim,) = dims
        starts = [p.storage_offset() // p.stride(dim) for p in parts]
        takes = [
            partial(slice_dim, input, dim, start, start + p.shape[dim]) for p, start in zip(parts, starts, strict=True)
        ]
    return tuple(record_multi_view(take(), input, take, function.__name__) for take in takes)


for _name in ("split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes"):
    for _function in {getattr(h, _name) for h in (torch, torch.Tensor)}:
        implements(_function, kind=OperatorKind.VIEW, order=StridePolicy.NEW, tensors=None)(partial(_divide, _function))


@implements(torch.diff, torch.Tensor.diff, tensors="input prepend append")
def diff(
    input: DistTensor,
    n: int = 1,
    dim: int = -1,
    prepend: torch.Tensor | None = None,
    append: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``torch.diff`` from slices.

    Parameters
    ----------
    input, n, dim, prepend, append
        As in ``torch.diff``.

    Returns
    -------
    Tensor
    """
    result_shape(torch.diff, input, n, dim, prepend, append)
    x: torch.Tensor = input
    ends = [t for t in (prepend, input, append) if t is not None]
    if n == 0:  # torch ignores prepend and append in this case.
        return input.clone()
    if len(ends) > 1:
        x = cat(ends, dim)
    # After as many steps as there are elements, no element is left.
    for _ in range(min(n, x.shape[dim])):
        later, earlier = x.narrow(dim, 1, x.shape[dim] - 1), x.narrow(dim, 0, x.shape[dim] - 1)
        x = later.logical_xor(earlier) if x.dtype == torch.bool else later - earlier
    return x


# -- flips and shifts -------------------------------------------------------------------------------------------------


@implements(torch.flip, torch.Tensor.flip)
def flip(input: DistTensor, *args: Any, **named: Any) -> DistTensor:
    """Compute ``torch.flip``; blocks of a split dimension move to the ranks on the opposite side.

    Parameters
    ----------
    input, *args, **named
        As in ``torch.flip``.

    Returns
    -------
    DistTensor
    """
    chosen = list(sizes_from_arguments(args or (named["dims"],)))
    result_shape(torch.flip, input, chosen)
    chosen = [d % max(1, input.dim()) for d in chosen]
    x = gather_cyclic_dims(input, chosen)
    flipped = []
    for dim in sorted(chosen):
        if x.dist.split[dim] is not None:
            edges = edges_of(x.dist, dim, x.shape[dim])
            flipped.append((dim, tuple(Interval(edges[-1] - b, edges[-1] - a) for a, b in pairwise(edges))))
    # 1. Each rank receives the indices that lie opposite to its block. 2. It flips them.
    local = x.local
    if flipped:
        local = gather_region(local, transfer_plan(x.dist, Needs(x.dist, tuple(flipped)), tuple(x.shape)))
    return DistTensor(local.flip(chosen), x.dist, x.shape)


@implements(torch.fliplr, torch.Tensor.fliplr)
def fliplr(input: DistTensor) -> DistTensor:
    """Compute ``torch.fliplr`` as :func:`flip`."""
    result_shape(torch.fliplr, input)
    return flip(input, 1)


@implements(torch.flipud, torch.Tensor.flipud, torch.Tensor.__reversed__)
def flipud(input: DistTensor) -> DistTensor:
    """Compute ``torch.flipud`` and ``reversed`` as :func:`flip`."""
    result_shape(torch.flipud, input)
    return flip(input, 0)


@implements(torch.rot90, torch.Tensor.rot90)
def rot90(input: DistTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> torch.Tensor:
    """Compute ``torch.rot90`` by a flip and a transposition.

    Parameters
    ----------
    input, k, dims
        As in ``torch.rot90``.

    Returns
    -------
    Tensor
    """
    result_shape(torch.rot90, input, k, tuple(dims))
    a, b = dims
    flips: list[list[int]] = [[], [b], [a, b], [a]]
    x: torch.Tensor = flip(input, flips[k % 4])
    return x.transpose(a, b) if k % 2 else x


@implements(torch.roll, torch.Tensor.roll, order=StridePolicy.OF_INPUT)
def roll(input: DistTensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> DistTensor:
    """Compute ``torch.roll`` as the concatenation of two slices.

    Parameters
    ----------
    input, shifts, dims
        As in ``torch.roll``.

    Returns
    -------
    DistTensor
    """
    result_shape(torch.roll, input, shifts, () if dims is None else dims)
    if dims is None or (not isinstance(dims, int) and not dims):
        assert isinstance(shifts, int) or len(shifts) == 1
        return reshape(_roll_dim(reshape(input, -1), shifts if isinstance(shifts, int) else shifts[0], 0), input.shape)
    pairs = zip(*([v] if isinstance(v, int) else v for v in (shifts, dims)), strict=True)
    for shift, dim in pairs:
        input = _roll_dim(input, shift, dim % input.dim())
    return input


def _roll_dim(x: DistTensor, shift: int, dim: int) -> DistTensor:
    """Roll one dimension. Collective."""
    extent = x.shape[dim]
    if x.dist.split[dim] is None or not extent:
        return DistTensor(x.local.roll(shift, dim), x.dist, x.shape)
    shift %= extent
    # cat moves only the indices that change their owner.
    return cat([slice_dim(x, dim, extent - shift, extent), slice_dim(x, dim, 0, extent - shift)], dim)


# -- windows and triangles --------------------------------------------------------------------------------------------


@implements(torch.Tensor.unfold, kind=OperatorKind.VIEW, order=StridePolicy.NEW)
@takes_view()
def unfold(input: DistTensor, dimension: int, size: int, step: int) -> ViewResult:
    """Compute ``Tensor.unfold``; windows of a split dimension are split.

    Each rank gathers the input of its windows.

    Parameters
    ----------
    input, dimension, size, step
        As in ``Tensor.unfold``.

    Returns
    -------
    DistTensor
        A view.
    """
    shape = result_shape(torch.Tensor.unfold, input, dimension, size, step)
    if not input.dim():
        return DistTensor(input.local.unfold(dimension, size, step), input.dist.with_axes([None]), shape), input
    dim = dimension % input.dim()
    x = gather_cyclic_dims(input, [dim])
    axis = x.dist.split[dim]
    edges, cyclic = boundaries_and_cyclic(x.dist, x.dist.axes)
    local = x.local
    if axis is not None:
        # Windows may overlap or leave gaps: a rank gathers the inputs from its first window to its last one.
        edges[axis] = balanced_edges(shape[dim], x.grid.shape[axis])
        needed = tuple(
            Interval(a * step, (b - 1) * step + size if b > a else a * step) for a, b in pairwise(edges[axis])
        )
        local = gather_region(local, transfer_plan(x.dist, Needs(x.dist, ((dim, needed),)), tuple(x.shape)))
    dist = distribution_from_edges(x.grid, (*x.dist.axes, None), edges, cyclic)
    local_shape = dist.local_shape(shape)
    windows = local.unfold(dim, size, step) if local_shape[dim] else empty_output(local, local_shape)
    result = DistTensor(windows, dist, shape)
    return result, x if axis is None else result


def _triangle(function: Any, input: DistTensor, diagonal: int = 0) -> DistTensor:
    """Compute ``torch.tril`` or ``triu``: each rank shifts the diagonal by the position of its block."""
    result_shape(function, input, diagonal)
    x = gather_cyclic_dims(input, range(input.dim() - 2, input.dim()))
    row, column = (x.dist.intervals(d, x.dist.coordinate(d), x.shape[d])[0].start for d in (-2, -1))
    return DistTensor(function(x.local, diagonal + row - column), x.dist, x.shape)


for _function in (torch.tril, torch.triu, torch.Tensor.tril, torch.Tensor.triu):
    implements(_function)(partial(_triangle, _function))
