"""Selection by tensors of indices, and repetition.

A dimension from which elements are selected is gathered. Indices stay split where the operator permits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv import recording
from distconv.communication.collectives import with_grad_allreduce
from distconv.communication.transport import allreduce
from distconv.dispatch import OperatorKind, StridePolicy, implements
from distconv.distribution import Distribution
from distconv.errors import NoRule
from distconv.grid import ProcessGrid
from distconv.layers.common.alignment import as_distributed, common_distribution, first_grid, result_shape
from distconv.layers.common.inplace_views import ViewResult, takes_view
from distconv.layers.common.value_check import check_indices
from distconv.layers.tensor.joining import cat
from distconv.layers.tensor.reshaping import reshape, sizes_from_arguments
from distconv.layers.tensor.slicing import slice_dim
from distconv.tensor import DistTensor


def gather_index(index: torch.Tensor) -> torch.Tensor:
    """Return the values of an index tensor on every rank. Collective for a DistTensor.

    Parameters
    ----------
    index : Tensor or DistTensor

    Returns
    -------
    Tensor
        A plain tensor.
    """
    return index.gather() if isinstance(index, DistTensor) else index


def check_index(index: DistTensor, extent: int, dim: int, *, allow_negative: bool = False) -> None:
    """Check that the indices of all ranks are in a dimension.

    Collective: call on every rank.

    Parameters
    ----------
    index : DistTensor
    extent : int
        Size of the dimension.
    dim : int
        The dimension, for the message.
    allow_negative : bool
        True to accept negative indices, which count from the end, as in brackets. Otherwise they are invalid.

    Raises
    ------
    IndexError
        With torch's message, naming an invalid index.
    """
    values = torch.where(index.local < 0, index.local + extent, index.local) if allow_negative else index.local

    def error(value: int) -> IndexError:
        if allow_negative and not extent:
            return IndexError("index is out of bounds for dimension with size 0")
        index = value - extent if allow_negative and value < 0 else value
        return IndexError(f"index {index} is out of bounds for dimension {dim} with size {extent}")

    check_indices(values, extent, index.grid, error)


@implements(torch.index_select, torch.Tensor.index_select, tensors="input index")
def index_select(input: torch.Tensor, dim: int, index: torch.Tensor) -> DistTensor:
    """Compute ``torch.index_select`` with ``dim`` gathered; the result is split along ``dim`` as the input is.

    Parameters
    ----------
    input, dim, index
        As in ``torch.index_select``.

    Returns
    -------
    DistTensor
    """
    shape = result_shape(torch.index_select, input, dim, index)
    grid = first_grid(input, index)
    x, dim = as_distributed(input, grid), dim % max(1, input.dim())
    full_index = gather_index(index)
    check_index(as_distributed(full_index, grid), x.shape[dim] if x.dim() else 1, dim)
    gathered = x.replicated([dim] if x.dim() else [])
    result = DistTensor(gathered.local.index_select(dim, full_index), gathered.dist, shape)
    return result.redistribute(Distribution(grid, x.dist.balanced().axes)) if x.dim() else result


@implements(torch.gather, torch.Tensor.gather, tensors="input index")
def gather(input: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> DistTensor:
    """Compute ``torch.gather``; dimensions in which index and input have the same size stay split, as the index is.

    Parameters
    ----------
    input, dim, index, sparse_grad
        As in ``torch.gather``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        With ``sparse_grad=True``.
    """
    shape = result_shape(torch.gather, input, dim, index)
    if sparse_grad:
        raise NoRule("torch.gather with sparse_grad=True has no distributed rule: leave it out")
    dim %= max(1, input.dim())
    # An index without elements may have any number of dimensions in torch. A scalar counts as one dimension.
    if not shape.numel() or input.dim() != index.dim():
        grid = first_grid(input, index)
        x, chosen = (as_distributed(t, grid).replicated() for t in (input, index))
        return DistTensor(torch.gather(x.local, dim, chosen.local), chosen.dist, shape)
    # Where the index is shorter than the input, a block of the index needs other rows than those of its rank.
    kept = [d != dim and m == n for d, (m, n) in enumerate(zip(input.shape, shape, strict=True))]
    operands = [t for t in (index, input) if isinstance(t, DistTensor)]
    dist = common_distribution([t.replicated([d for d, k in enumerate(kept) if not k]) for t in operands], shape)
    chosen = as_distributed(index, dist.grid).redistribute(dist)
    check_index(chosen, input.shape[dim] if input.dim() else 1, dim)
    x = as_distributed(input, dist.grid).redistribute(dist)
    return DistTensor(torch.gather(x.local, dim, chosen.local), dist, shape)


@implements(torch.take_along_dim, torch.Tensor.take_along_dim, tensors="input indices")
def take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> DistTensor:
    """Compute ``torch.take_along_dim`` by :func:`gather`.

    Parameters
    ----------
    input, indices, dim
        As in ``torch.take_along_dim``.

    Returns
    -------
    DistTensor
    """
    result_shape(torch.take_along_dim, input, indices, dim)
    if dim is None:
        return gather(input.reshape(-1), 0, indices.reshape(-1))
    dim %= input.dim()
    # Unlike gather, the operands broadcast in all dimensions but `dim`, and negative indices count from the end.
    extents = torch.broadcast_shapes(*((*t.shape[:dim], 1, *t.shape[dim + 1 :]) for t in (input, indices)))
    x, index = (t.expand(*extents[:dim], t.shape[dim], *extents[dim + 1 :]) for t in (input, indices))
    return gather(x, dim, torch.where(index < 0, index + input.shape[dim], index))


@implements(F.one_hot)
def one_hot(input: DistTensor, num_classes: int = -1) -> DistTensor:
    """Compute ``F.one_hot`` block by block; the new last dimension is replicated.

    Parameters
    ----------
    input, num_classes
        As in ``F.one_hot``.

    Returns
    -------
    DistTensor
    """
    encode = partial(_encode_block, input.grid, num_classes)
    if num_classes < 0:  # The number of classes depends on values.
        local = encode(input.local)
    elif input.local.is_cuda:  # torch checks the classes in its kernel.
        local = F.one_hot(input.local, num_classes)
    else:
        local = recording.call(encode, input.local)
    return DistTensor(
        local, input.dist.with_axes((*input.dist.axes, None)), torch.Size((*input.shape, local.shape[-1]))
    )


def _encode_block(grid: ProcessGrid, num_classes: int, local: torch.Tensor) -> torch.Tensor:
    """Compute ``F.one_hot`` of a block with the number of classes of all ranks. Collective."""
    # A rank without elements contributes values that change neither the number of classes nor the check. The minimum
    # is sent negated, so that one all-reduce with MAX serves both.
    highest = local.max() if local.numel() else torch.tensor(-1, device=local.device)
    lowest = local.min() if local.numel() else torch.tensor(0, device=local.device)
    ends = allreduce(grid.world, torch.stack([highest, -lowest]), "range of classes", MPI.MAX)
    # torch checks the global extremes, so that all ranks raise the same error.
    classes = F.one_hot(ends * torch.tensor([1, -1], device=ends.device), num_classes).shape[-1]
    return F.one_hot(local, classes)


# -- advanced indexing ------------------------------------------------------------------------------------------------


def select_indexed(input: DistTensor, entries: Sequence[Any]) -> DistTensor:
    """Return ``input[entries]``; indexed dimensions are gathered.

    Collective: call on every rank.

    Parameters
    ----------
    input : DistTensor
    entries : sequence
        For each dimension the slice ``:`` or a tensor of indices.

    Returns
    -------
    DistTensor
        Its dimensions that come from index tensors are not split.
    """
    dims = [d for d, e in enumerate(entries) if isinstance(e, torch.Tensor)]
    full_entries = [gather_index(e) if isinstance(e, torch.Tensor) else e for e in entries]
    for dim in dims:
        check_index(as_distributed(full_entries[dim], input.grid), input.shape[dim], dim, allow_negative=True)
    x = input.replicated(dims)
    # As in torch and NumPy, the dimensions of the indices stand where the indexed ones were if these are adjacent;
    # otherwise they come first.
    is_contiguous = dims[-1] - dims[0] == len(dims) - 1
    count = max(full_entries[d].dim() for d in dims)
    left = [a for d, a in enumerate(x.dist.axes) if d not in dims]
    at = dims[0] if is_contiguous else 0
    dist = x.dist.with_axes([*left[:at], *(None,) * count, *left[at:]])
    extents = [n for d, n in enumerate(x.shape) if d not in dims]
    index_shape = torch.broadcast_shapes(*(full_entries[d].shape for d in dims))
    local = x.local[tuple(full_entries)]
    return DistTensor(local, dist, torch.Size([*extents[:at], *index_shape, *extents[at:]]))


def look_up_rows(table: torch.Tensor, index: DistTensor) -> DistTensor:
    """Return the rows of a plain table for a distributed tensor of row indices.

    Collective: call on every rank. The gradient of the table is all-reduced.

    Parameters
    ----------
    table : Tensor
        (K, ...), identical on all ranks.
    index : DistTensor

    Returns
    -------
    DistTensor
        The dimensions of ``index``, split as ``index`` is, and those of a row.
    """
    check_index(index, table.shape[0], 0, allow_negative=True)
    rows = with_grad_allreduce(table, index.grid, index.dist.split_axes)[index.local]
    rest = table.shape[1:]
    return DistTensor(rows, index.dist.with_axes((*index.dist.axes, *(None,) * len(rest))), index.shape + rest)


# -- repeating --------------------------------------------------------------------------------------------------------


@implements(
    torch.Tensor.expand, torch.broadcast_to, torch.Tensor.broadcast_to, kind=OperatorKind.VIEW, order=StridePolicy.NEW
)
@takes_view()
def expand(input: DistTensor, *size: Any, implicit: bool = False, **named: Any) -> ViewResult:
    """Compute ``Tensor.expand``; dimensions that grow, and new ones, are replicated.

    Parameters
    ----------
    input, *size, implicit, **named
        As in ``Tensor.expand``.

    Returns
    -------
    DistTensor
        A view.
    """
    shape = result_shape(torch.Tensor.expand, input, sizes_from_arguments(size or (named["size"],)))
    new = len(shape) - input.dim()
    # A dimension that grows has one element, which all ranks need.
    x = input.replicated([d for d, n in enumerate(input.shape) if n != shape[new + d]])
    dist = x.dist.with_axes((*(None,) * new, *x.dist.axes))
    return DistTensor(x.local.expand(dist.local_shape(shape)), dist, shape), x


@implements(torch.Tensor.expand_as, kind=OperatorKind.VIEW, order=StridePolicy.NEW, tensors="input other")
def expand_as(input: DistTensor, other: torch.Tensor) -> torch.Tensor:
    """Compute ``Tensor.expand_as`` with the shape of ``other``, regardless of its distribution.

    Parameters
    ----------
    input, other
        As in ``Tensor.expand_as``.

    Returns
    -------
    Tensor
    """
    return input.expand(tuple(other.shape))


@implements(torch.broadcast_tensors, kind=OperatorKind.VIEW, order=StridePolicy.NEW, tensors=None)
def broadcast_tensors(*tensors: Any) -> tuple[torch.Tensor, ...]:
    """Compute ``torch.broadcast_tensors`` by :func:`expand`.

    Parameters
    ----------
    *tensors
        As in ``torch.broadcast_tensors``.

    Returns
    -------
    tuple of Tensor
    """
    operands = tensors if isinstance(tensors[0], torch.Tensor) else tuple(tensors[0])
    shape = tuple(torch.broadcast_shapes(*(t.shape for t in operands)))
    return tuple(t.expand(shape) for t in operands)


@implements(torch.Tensor.repeat, torch.tile, torch.Tensor.tile)
def repeat(input: DistTensor, *repeats: Any, **named: Any) -> DistTensor:
    """Compute ``Tensor.repeat`` and ``torch.tile``; a split dimension is concatenated with itself.

    The result has balanced blocks along it.

    Parameters
    ----------
    input, *repeats, **named
        As in ``Tensor.repeat``.

    Returns
    -------
    DistTensor
    """
    counts = sizes_from_arguments(repeats or tuple(named.values()))
    counts = (1,) * (input.dim() - len(counts)) + counts
    result_shape(torch.Tensor.repeat, input, counts)
    x = reshape(input, (1,) * (len(counts) - input.dim()) + tuple(input.shape))
    split = [d for d, n in enumerate(counts) if n != 1 and x.dist.split[d] is not None]
    # Repeating each block would interleave the copies of the blocks.
    for dim in split:
        x = cat([x] * counts[dim], dim) if counts[dim] else slice_dim(x, dim, 0, 0)
    rest = [1 if d in split else n for d, n in enumerate(counts)]
    return DistTensor(x.local.repeat(rest), x.dist, torch.Size(n * m for n, m in zip(x.shape, rest, strict=True)))


@implements(torch.repeat_interleave, torch.Tensor.repeat_interleave, tensors="input repeats")
def repeat_interleave(
    input: DistTensor, repeats: int | torch.Tensor, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor:
    """Compute ``torch.repeat_interleave``; with one number of repeats for all elements, each rank repeats its own.

    With a number for each element, ``dim`` is gathered.

    Parameters
    ----------
    input, repeats, dim, output_size
        As in ``torch.repeat_interleave``.

    Returns
    -------
    Tensor
    """
    x, dim = (reshape(input, -1), 0) if dim is None else (input, range(input.dim())[dim])
    if isinstance(repeats, int) or repeats.numel() == 1:
        # Copies of an element stay next to it, so the block of the result is the repeated block.
        shape = (*x.shape[: dim + 1], int(repeats), *x.shape[dim + 1 :])
        return x.unsqueeze(dim + 1).expand(shape).flatten(dim, dim + 1)
    index = torch.repeat_interleave(torch.arange(x.shape[dim]), gather_index(repeats).cpu(), output_size=output_size)
    return index_select(x, dim, index.to(x.device))
