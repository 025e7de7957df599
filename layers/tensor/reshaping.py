"""Views with merged, split, reordered, added or removed dimensions.

Dimensions stay split wherever reshaping each block reshapes the global tensor. Blocks move between ranks if their edges
do not permit this, and dimensions are gathered as the last resort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from distconv.dispatch import OperatorKind, StridePolicy, implements
from distconv.distribution import Distribution
from distconv.errors import NoRule, ShapeError, UnsupportedOperation
from distconv.grid import cached_on_grid
from distconv.layers.common.alignment import result_shape
from distconv.layers.common.block_edges import (
    Edges,
    balanced_edges,
    boundaries_and_cyclic,
    distribution_from_edges,
    edges_of,
    is_cyclic,
)
from distconv.layers.common.inplace_views import ViewResult, takes_view
from distconv.memory_order import can_view_as
from distconv.tensor import DistTensor


def sizes_from_arguments(given: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes or dimensions that are passed as separate arguments or as one sequence.

    Parameters
    ----------
    given : sequence
        Positional arguments.

    Returns
    -------
    tuple of int
    """
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], int) else tuple(given)


# -- merging and splitting --------------------------------------------------------------------------------------------


@implements(torch.reshape, torch.Tensor.reshape, kind=OperatorKind.VIEW)
def reshape(input: DistTensor, *shape: Any, **named: Any) -> DistTensor:
    """Compute ``torch.reshape``; a split dimension that leads its group of dimensions stays split.

    A group consists of dimensions that are merged or into which a dimension is divided.

    Parameters
    ----------
    input, *shape, **named
        As in ``torch.reshape``.

    Returns
    -------
    DistTensor
    """
    out_shape = result_shape(torch.reshape, input, sizes_from_arguments(shape or (named["shape"],)))
    return _reshape_view(input, out_shape)


@implements(torch.Tensor.view, kind=OperatorKind.VIEW)
def view(input: DistTensor, *shape: Any, **named: Any) -> DistTensor:
    """Compute ``Tensor.view``, as :func:`reshape` for tensors that torch can view without a copy.

    Parameters
    ----------
    input, *shape, **named
        As in ``Tensor.view``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        For a view as another dtype.
    ShapeError
        If a single process would have to copy, with torch's message.
    """
    shape = shape or tuple(named.values())
    if isinstance(shape[0], torch.dtype):
        raise NoRule("Tensor.view(dtype) has no distributed rule: convert with .to(dtype) instead")
    out_shape = result_shape(torch.reshape, input, sizes_from_arguments(shape))
    if not can_view_as(input, out_shape):
        raise ShapeError(
            "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
            "contiguous subspaces). Use .reshape(...) instead."
        )
    return _reshape_view(input, out_shape)


@takes_view(lambda changed, input, out_shape: input.copy_(reshape(changed, input.shape)))
def _reshape_view(input: DistTensor, out_shape: torch.Size) -> ViewResult:
    """Return a view if a single process returns one; otherwise a copy."""
    source, target = _plan_reshape(input.dist, input.dist.axes, input.shape, out_shape)
    x = input.redistribute(source)
    local = x.local.reshape(target.local_shape(out_shape))
    shares_memory = local.untyped_storage().data_ptr() == input.local.untyped_storage().data_ptr()
    if not can_view_as(input, out_shape):
        return DistTensor(local.clone() if shares_memory else local, target, out_shape), None
    result = DistTensor(local, target, out_shape)
    # If the block had to be copied, a tensor other than the input marks the result as moved.
    return result, x if shares_memory or x is not input else result


@cached_on_grid
def _plan_reshape(
    dist: Distribution, axes: tuple[str | None, ...], old: torch.Size, new: torch.Size
) -> tuple[Distribution, Distribution]:
    """Return distributions of the input and the result such that reshaping each block reshapes the global tensor.

    ``axes`` are the axes of ``dist``. They are a key of the cache, because equal distributions may differ in the names
    of axes with one rank.
    """
    # Groups of dimensions are found by products of sizes, which zeros would make ambiguous.
    if not old.numel():
        return dist.replicate(), Distribution(dist.grid, (None,) * len(new))
    source: list[str | None] = [None] * len(old)
    target: list[str | None] = [None] * len(new)
    before, cyclic = boundaries_and_cyclic(dist, axes)
    after, cyclic_after = dict(before), dict(cyclic)
    for olds, news in _dimension_groups(old, new):
        if len(olds) == len(news) == 1:
            source[olds[0]] = target[news[0]] = axes[olds[0]]
            continue
        # 1. A split of another than the slowest dimension may become block-cyclic. 2. A split of the slowest one stays,
        # with edges that lie between indices of both shapes. 3. Otherwise the group is gathered.
        leading, first = _leading_dim(old, olds), _leading_dim(new, news)
        # A group of ones has one element, which no axis splits.
        if leading is None or first is None:
            continue
        if dist.split[leading] is None or is_cyclic(dist, leading):
            block_cyclic = _block_cyclic_split(dist, (old, new), olds, news)
            if block_cyclic is not None:
                dim, at, name, size = block_cyclic
                source[dim] = target[at] = name
                cyclic_after.pop(name, None)
                # With one period the blocks are ordinary ones.
                if size * dist.grid.shape[name] != new[at]:
                    cyclic_after[name] = size
                continue
        if axes[leading] is None or is_cyclic(dist, leading):
            continue
        step, new_step = math.prod(old[leading + 1 : olds.stop]), math.prod(new[first + 1 : news.stop])
        group_edges = _group_edges(edges_of(dist, leading, old[leading]), step, new_step)
        if group_edges is not None:
            axis = axes[leading]
            assert axis is not None
            source[leading] = target[first] = axis
            before[axis], after[axis] = (tuple(e // s for e in group_edges) for s in (step, new_step))
    return distribution_from_edges(dist.grid, source, before, cyclic), distribution_from_edges(
        dist.grid, target, after, cyclic_after
    )


def _block_cyclic_split(
    dist: Distribution, shapes: tuple[torch.Size, torch.Size], olds: range, news: range
) -> tuple[int, int, str, int] | None:
    """Return an old dimension that stays split although other elements of its group surround it, or None.

    The result is that dimension, the new dimension that is split block-cyclically, the axis and the block size.

    In (l, n) with n in equal blocks of b, every period of n holds a block of each part. So the merged dimension l * n
    is block-cyclic with blocks of b, and can be divided into (l, n) again.
    """
    old, new = shapes
    for dim in olds:
        axis = dist.split[dim]
        if axis is None or axis in dist.boundaries:
            continue
        parts, inner = dist.grid.shape[axis], math.prod(old[dim + 1 : olds.stop])
        # Balanced blocks count as one period of a block-cyclic dimension.
        size = dist.cyclic.get(axis, old[dim] // parts)
        # Uneven blocks would give blocks of several sizes, which a block-cyclic axis cannot describe.
        if not size or old[dim] % (size * parts):
            continue
        block, period = size * inner, size * inner * parts
        for at in news:
            step = math.prod(new[at + 1 : news.stop])
            # Indices of the new dimension must not cut a block, and must cover complete periods.
            if new[at] > 1 and not block % step and not (new[at] * step) % period:
                return dim, at, axis, block // step
    return None


def _dimension_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Return the shortest runs of old and new dimensions that hold the same number of elements.

    Examples
    --------
    >>> _dimension_groups((6, 4, 5), (2, 3, 20))
    [(range(0, 1), range(0, 2)), (range(1, 3), range(2, 3))]
    """
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        start = (i, j)
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while math.prod(old[start[0] : i]) != math.prod(new[start[1] : j]):
            if math.prod(old[start[0] : i]) < math.prod(new[start[1] : j]):
                i += 1
            else:
                j += 1
        groups.append((range(start[0], i), range(start[1], j)))
    return groups


def _leading_dim(shape: Sequence[int], dims: Sequence[int]) -> int | None:
    """Return the first of ``dims`` with more than one index."""
    return next((d for d in dims if shape[d] > 1), None)


def _group_edges(edges: Edges, step: int, new_step: int) -> Edges | None:
    """Return the edges of a group's flattened elements, or None if there are too few for the blocks.

    ``edges`` are those of the leading old dimension, whose indices have ``step`` elements each. They are kept if they
    are multiples of ``new_step``. Otherwise blocks are balanced in units of both steps.
    """
    flat = tuple(e * step for e in edges)
    # The edges stay where they are: nothing moves.
    if all(e % new_step == 0 for e in flat):
        return flat
    # An edge must lie between two indices of the old and of the new leading dimension.
    unit = math.lcm(step, new_step)
    parts = len(edges) - 1
    if flat[-1] // unit < parts:
        return None
    return tuple(e * unit for e in balanced_edges(flat[-1] // unit, parts))


@implements(torch.flatten, torch.Tensor.flatten, kind=OperatorKind.VIEW)
def flatten(input: DistTensor, start_dim: int = 0, end_dim: int = -1) -> DistTensor:
    """Compute ``torch.flatten`` as :func:`reshape`.

    Parameters
    ----------
    input, start_dim, end_dim
        As in ``torch.flatten``.

    Returns
    -------
    DistTensor
    """
    return _reshape_view(input, result_shape(torch.flatten, input, start_dim, end_dim))


@implements(torch.unflatten, torch.Tensor.unflatten, kind=OperatorKind.VIEW)
def unflatten(input: DistTensor, dim: int, sizes: Sequence[int]) -> DistTensor:
    """Compute ``torch.unflatten`` as :func:`view`.

    Parameters
    ----------
    input, dim, sizes
        As in ``torch.unflatten``.

    Returns
    -------
    DistTensor
    """
    return view(input, result_shape(torch.unflatten, input, dim, tuple(sizes)))


@implements(torch.ravel, torch.Tensor.ravel, kind=OperatorKind.VIEW)
def ravel(input: DistTensor) -> DistTensor:
    """Compute ``torch.ravel`` as :func:`reshape`."""
    return reshape(input, -1)


@implements(torch.Tensor.view_as, kind=OperatorKind.VIEW, tensors="input other")
def view_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute ``Tensor.view_as`` with the shape of ``other``, regardless of its distribution.

    Parameters
    ----------
    input, other
        As in ``Tensor.view_as``.

    Returns
    -------
    Tensor
    """
    return input.view(tuple(other.shape))


@implements(torch.Tensor.reshape_as, kind=OperatorKind.VIEW, tensors="input other")
def reshape_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute ``Tensor.reshape_as`` with the shape of ``other``, regardless of its distribution.

    Parameters
    ----------
    input, other
        As in ``Tensor.reshape_as``.

    Returns
    -------
    Tensor
    """
    return input.reshape(tuple(other.shape))


# -- dimensions of size one -------------------------------------------------------------------------------------------


@implements(torch.squeeze, torch.Tensor.squeeze, kind=OperatorKind.VIEW)
@takes_view(lambda changed, input, *dims, **named: input.copy_(reshape(changed, input.shape)))
def squeeze(input: DistTensor, dim: int | Sequence[int] | None = None) -> ViewResult:
    """Compute ``torch.squeeze``; removed dimensions are gathered.

    Parameters
    ----------
    input, dim
        As in ``torch.squeeze``.

    Returns
    -------
    DistTensor
        A view.
    """
    removed = _size_one_dims(input, dim)
    x = input.replicated(removed)
    left = [d for d in range(x.dim()) if d not in removed]
    dist, shape = x.dist.with_axes([x.dist.axes[d] for d in left]), torch.Size(x.shape[d] for d in left)
    return DistTensor(x.local.reshape(dist.local_shape(shape)), dist, shape), x


def _size_one_dims(input: DistTensor, dim: int | Sequence[int] | None) -> list[int]:
    result_shape(torch.squeeze, input, *(() if dim is None else (dim,)))
    chosen = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    return sorted({d % max(1, input.dim()) for d in chosen} & {d for d, n in enumerate(input.shape) if n == 1})


@implements(torch.unsqueeze, torch.Tensor.unsqueeze, kind=OperatorKind.VIEW)
@takes_view()
def unsqueeze(input: DistTensor, dim: int) -> ViewResult:
    """Compute ``torch.unsqueeze``; the new dimension is replicated.

    Parameters
    ----------
    input, dim
        As in ``torch.unsqueeze``.

    Returns
    -------
    DistTensor
        A view.
    """
    shape = result_shape(torch.unsqueeze, input, dim)
    dim %= len(shape)
    axes = (*input.dist.axes[:dim], None, *input.dist.axes[dim:])
    return DistTensor(input.local.unsqueeze(dim), input.dist.with_axes(axes), shape), input


@implements(torch.Tensor.squeeze_, kind=OperatorKind.VIEW)
def squeeze_(input: DistTensor, dim: int | Sequence[int] | None = None) -> DistTensor:
    """Compute ``Tensor.squeeze_`` of dimensions that are not split.

    Parameters
    ----------
    input, dim
        As in ``Tensor.squeeze_``.

    Returns
    -------
    DistTensor

    Raises
    ------
    UnsupportedOperation
        For a dimension that is split.
    """
    removed = _size_one_dims(input, dim)
    if any(input.dist.split[d] for d in removed):
        raise UnsupportedOperation(
            f"squeeze_: a dimension to remove is split ({input.dist}). Write x = x.squeeze(...)."
        )
    # 1. The view, for the new layout. 2. The block itself, so that it stays the tensor that other views share.
    squeezed = input.squeeze(removed)
    input.local.squeeze_(removed)
    return _set_layout_like(input, squeezed)


@implements(torch.Tensor.unsqueeze_, kind=OperatorKind.VIEW)
def unsqueeze_(input: DistTensor, dim: int) -> DistTensor:
    """Compute ``Tensor.unsqueeze_``; the new dimension is replicated.

    Parameters
    ----------
    input, dim
        As in ``Tensor.unsqueeze_``.

    Returns
    -------
    DistTensor
    """
    unsqueezed = input.unsqueeze(dim)
    input.local.unsqueeze_(dim % unsqueezed.dim())
    return _set_layout_like(input, unsqueezed)


def _set_layout_like(input: DistTensor, other: Any) -> DistTensor:
    """Give ``input`` the distribution, shape and strides of ``other``, and return it."""
    input._set_layout(other.dist, other.shape, other._strides)
    return input


def _atleast(count: int, *tensors: Any) -> Any:
    """Compute ``torch.atleast_1d``, ``2d`` or ``3d`` of one tensor or of several."""
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        tensors = tuple(tensors[0])
    results = []
    for tensor in tensors:
        for at in ((0,), (0, 0), (0, 0, -1))[count - 1][tensor.dim() :]:
            tensor = tensor.unsqueeze(at)
        results.append(tensor)
    return results[0] if len(results) == 1 else tuple(results)


for _count, _function in enumerate((torch.atleast_1d, torch.atleast_2d, torch.atleast_3d), start=1):
    implements(_function, kind=OperatorKind.VIEW, tensors=None)(partial(_atleast, _count))


# -- order ------------------------------------------------------------------------------------------------------------


@takes_view()
def permute_dims(input: DistTensor, order: Sequence[int]) -> ViewResult:
    """Return a tensor with its dimensions in another order; the axes move with their dimensions.

    Parameters
    ----------
    input : DistTensor
    order : sequence of int

    Returns
    -------
    DistTensor
        A view.
    """
    dist = input.dist.with_axes([input.dist.axes[d] for d in order])
    shape = torch.Size(input.shape[d] for d in order)
    return DistTensor(input.local.permute(*order), dist, shape), input


def _permute_by(function: Callable[..., torch.Tensor], input: DistTensor, *args: Any, **named: Any) -> DistTensor:
    """Call a function that only permutes dimensions; the order follows from its result for sizes 0, 1, 2, ..."""
    # Dimension d has size d, so the shape of torch's result is the order of the dimensions.
    extents = torch.empty(tuple(range(input.dim())), device="meta")
    options = (list(a) if isinstance(a, (list, tuple)) else a for a in args)
    return permute_dims(input, result_shape(function, extents, *options, **named))


def _permute_and_conjugate(function: Callable[..., torch.Tensor], input: DistTensor) -> torch.Tensor:
    """Call a function that permutes dimensions, and conjugate the result."""
    return _permute_by(function, input).conj()


_permutations = [
    getattr(holder, name)
    for name in ("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "t")
    for holder in (torch, torch.Tensor)
    if hasattr(holder, name)
]
_permutations += [vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT")]
for _function in _permutations:
    implements(_function, kind=OperatorKind.VIEW, order=StridePolicy.NEW)(partial(_permute_by, _function))
_adjoints = [torch.adjoint, torch.Tensor.adjoint, *(vars(torch._C.TensorBase)[n].__get__ for n in ("H", "mH"))]
for _function in _adjoints:
    implements(_function, kind=OperatorKind.VIEW, order=StridePolicy.NEW)(partial(_permute_and_conjugate, _function))


def _permute_in_place(name: str, input: DistTensor, *args: Any, **named: Any) -> DistTensor:
    """Compute ``Tensor.transpose_`` or a variant.

    Raises
    ------
    UnsupportedOperation
        For a view, which would have to be taken again in the old order.
    """
    if input._view is not None:
        raise UnsupportedOperation(f"{name}: views of DistTensors are not supported. Write x = x.{name[:-1]}(...).")
    permuted = getattr(torch.Tensor, name[:-1])(input, *args, **named)
    getattr(input.local, name)(*args, **named)
    return _set_layout_like(input, permuted)


for _name in ("transpose_", "t_", "swapaxes_", "swapdims_"):
    implements(getattr(torch.Tensor, _name), kind=OperatorKind.VIEW)(partial(_permute_in_place, _name))
