"""Functions of matrices or signals in a batch that is split over ranks.

Each rank computes the matrices of its part of the batch. A split of the last dimensions moves to the batch first. If
the batch has fewer matrices than there are ranks, the function is computed replicated, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from distconv.dispatch import OperatorKind, StridePolicy, implements, map_leaves, short_name
from distconv.distribution import Distribution
from distconv.errors import NoRule
from distconv.layers.common.alignment import (
    all_to_all_transpose,
    first_grid,
    redistribute_with_grad_reduce,
    replicate_parameter,
    result_shape,
)
from distconv.layers.common.block_edges import Edges, boundaries_and_cyclic, distribution_from_edges
from distconv.layers.common.empty_blocks import connected_zeros, pad_to_minimum_shape, run_like_other_ranks
from distconv.layers.common.inplace_views import ViewResult, takes_view
from distconv.layers.common.value_check import call_or_raise_on_all_ranks
from distconv.tensor import DistTensor


def call_batched(
    function: Callable[..., Any], operands: Sequence[torch.Tensor], core_dims: Sequence[int], *args: Any, **named: Any
) -> Any:
    """Call a function with each rank computing its part of the batch.

    Parameters
    ----------
    function : callable
        Its results have the dimensions of the batch first.
    operands : sequence of Tensor
        Tensors whose batches broadcast.
    core_dims : sequence of int
        Number of last dimensions of each operand that belong to one call.
    *args, **named
        Further arguments of ``function``. Each rank gets their tensors in full.

    Returns
    -------
    object
        The result of ``function`` with each tensor as a DistTensor.

    Raises
    ------
    NoRule
        If no dimension of the batch can be split.
    """
    name = short_name(function)
    if any(t.dim() < count for t, count in zip(operands, core_dims, strict=True)):
        raise NoRule(f"{name} of tensors with too few dimensions")
    # Splits of the core dimensions move to the batch.
    tensors = [
        all_to_all_transpose(t, range(t.dim() - count, t.dim())) if isinstance(t, DistTensor) else t
        for t, count in zip(operands, core_dims, strict=True)
    ]
    shapes = [t.shape[: t.dim() - count] for t, count in zip(tensors, core_dims, strict=True)]
    try:
        batch = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise NoRule(f"{name} of batches that do not broadcast") from None
    batch_dist = _batch_distribution(tensors, shapes, batch)
    if not batch_dist.split_axes and any(t.dist.split_axes for t in operands if isinstance(t, DistTensor)):
        raise NoRule(
            f"{name} of a distributed tensor without a batch that can be split: put at least as many matrices or "
            "signals as there are ranks into the first dimension, or gather it first (dc.gather(x))"
        )
    blocks = []
    for t, shape, count in zip(tensors, shapes, core_dims, strict=True):
        offset = len(batch) - len(shape)
        axes = [batch_dist.axes[d + offset] if n == batch[d + offset] else None for d, n in enumerate(shape)]
        # Over these axes ranks use the same matrices of an operand that broadcasts, so its gradient is a sum.
        reduced = [axis for axis in batch_dist.axes if axis is not None and axis not in axes]
        blocks.append(redistribute_with_grad_reduce(t, batch_dist.with_axes([*axes, *(None,) * count]), reduced))

    def replicate(value: Any) -> Any:
        return replicate_parameter(value, batch_dist) if isinstance(value, torch.Tensor) else value

    args, named = map_leaves(replicate, (args, named))
    local_batch = batch_dist.local_shape(batch)
    # A rank without matrices computes as well: call_or_raise_on_all_ranks waits for all ranks.
    if 0 in local_batch:
        blocks = [_fill_empty_batch(block, block.dim() - count) for block, count in zip(blocks, core_dims, strict=True)]
    results = call_or_raise_on_all_ranks(batch_dist.grid, function, *blocks, *args, **named)

    def wrap(y: Any) -> Any:
        if not isinstance(y, torch.Tensor):
            return y
        core = y.shape[len(batch) :]
        y = connected_zeros(y, (*local_batch, *core)) if 0 in local_batch else y
        dist = batch_dist.with_axes([*batch_dist.axes, *(None,) * len(core)])
        result = DistTensor(y, dist, torch.Size((*batch, *core)))
        # As in call_along_dims, a result with the shape of an operand is split as this operand is.
        same_shape = (t.dist for t in operands if isinstance(t, DistTensor) and t.shape == result.shape)
        return result.redistribute(next(same_shape, result.dist))

    return map_leaves(wrap, results)


def _batch_distribution(
    tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size], batch: torch.Size
) -> Distribution:
    """Return the distribution of the batch to which the batch ``shapes`` of ``tensors`` broadcast.

    Each dimension has the split of the first tensor that splits it.
    """
    grid = first_grid(*tensors)
    axes: list[str | None] = [None] * len(batch)
    edges: dict[str, Edges] = {}
    cyclic: dict[str, int] = {}
    for tensor, shape in zip(tensors, shapes, strict=True):
        if not isinstance(tensor, DistTensor):
            continue
        for dim, axis in enumerate(tensor.dist.split[: len(shape)]):
            at = dim + len(batch) - len(shape)
            if axis is not None and axes[at] is None and axis not in axes and shape[dim] == batch[at]:
                axes[at] = axis
                if tensor.grid == grid:
                    boundaries, block_sizes = boundaries_and_cyclic(tensor.dist, (axis,))
                    edges |= boundaries
                    cyclic |= block_sizes
    return distribution_from_edges(grid, axes, edges, cyclic)


def _fill_empty_batch(block: torch.Tensor, dims: int) -> torch.Tensor:
    """Return ``block``, or one regular matrix or signal if its first ``dims`` dimensions, the batch, are empty.

    A rank without matrices computes one, so that its graph is that of the other ranks.
    """
    if 0 not in block.shape[:dims]:
        return block
    core = block.shape[dims:]
    one = torch.zeros(core, dtype=block.dtype, device=block.device)
    diagonal = one.diagonal() if len(core) == 2 else one
    if len(core) == 2 or not block.is_floating_point():
        diagonal.copy_(torch.arange(1, len(diagonal) + 1))  # different eigenvalues, or pivots
    return pad_to_minimum_shape(block, (*(1,) * dims, *core)) + one


@dataclass(frozen=True)
class _BatchedFunction:
    """A function as an operator: the names of its operands in torch, and the number of last dimensions of each."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    core_dims: tuple[int, ...]

    def __call__(self, *args: Any, **named: Any) -> Any:
        count = len(self.core_dims)
        operands = [*args[:count], *(named.pop(name) for name in self.names[len(args) :] if name in named)]
        if len(operands) < count or any(isinstance(v, DistTensor) for v in tree_leaves((args[count:], named))):
            raise NoRule(
                f"{short_name(self.function)} with these arguments has no distributed rule; pass its options as "
                "plain numbers"
            )
        options = (*args[count:], *named.values())
        per_matrix = any(isinstance(option, torch.Tensor) and option.dim() > 0 for option in options)
        if self.function in _OPTIONS_BY_MATRIX and per_matrix:
            raise NoRule(
                f"{short_name(self.function)} with a tolerance for each matrix has no distributed rule; pass one number"
            )
        core_dims = list(self.core_dims)
        if self.function in _VECTOR_SOLVERS:
            # torch's rule for B: a vector for each matrix, if the shape of A without its columns is that of B.
            a, b = operands
            if b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1]):
                core_dims[1] = 1
        return call_batched(self.function, operands, core_dims, *args[count:], **named)


_OPTIONS_BY_MATRIX = (torch.linalg.matrix_rank, torch.linalg.pinv)
"""Functions whose options may be tensors that broadcast over the batch of matrices."""

_VECTOR_SOLVERS = (torch.linalg.solve, torch.linalg.solve_ex)
"""Functions of matrices A (..., N, N) and B, which may be vectors (..., N)."""


def _register() -> None:
    matrix: dict[str, int] = {"A": 2}
    for name in (
        "cholesky cholesky_ex cond det eig eigh eigvals eigvalsh inv inv_ex ldl_factor ldl_factor_ex lu lu_factor "
        "lu_factor_ex matrix_exp matrix_power matrix_rank pinv qr slogdet svd svdvals"
    ).split():
        _register_batched([torch.linalg], name, matrix)
    for name in ("solve", "solve_ex", "solve_triangular"):
        _register_batched([torch.linalg], name, {"A": 2, "B": 2})
    _register_batched([torch.linalg], "lu_solve", {"LU": 2, "pivots": 1, "B": 2})
    _register_batched([torch.linalg], "ldl_solve", {"LD": 2, "pivots": 1, "B": 2})
    _register_batched([torch.linalg], "householder_product", {"A": 2, "tau": 1})
    both = [torch, torch.Tensor]
    for name in "cholesky cholesky_inverse det inverse logdet matrix_exp matrix_power pinverse qr slogdet svd".split():
        _register_batched(both, name, {"input": 2})
    _register_batched(both, "cholesky_solve", {"input": 2, "input2": 2})
    _register_batched(both, "triangular_solve", {"input": 2, "A": 2})
    _register_batched(both, "lu_solve", {"input": 2, "LU_data": 2, "LU_pivots": 1})
    _register_batched(both, "stft", {"input": 1})
    _register_batched(both, "istft", {"input": 2})


def _register_batched(modules: Sequence[Any], name: str, core_dims: dict[str, int]) -> None:
    """Register the function ``name`` of ``modules``; ``core_dims`` counts the last dimensions of each operand."""
    functions = {getattr(module, name) for module in modules}
    implements(*functions, order=StridePolicy.NEW, tensors=None, passes=None)(
        _BatchedFunction(getattr(modules[0], name), tuple(core_dims), tuple(core_dims.values()))
    )


_register()


# -- norms of matrices ------------------------------------------------------------------------------------------------


@implements(torch.linalg.matrix_norm, passes=None)
def matrix_norm(
    A: DistTensor,
    ord: float | str = "fro",
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``torch.linalg.matrix_norm``: the Frobenius norm as a vector norm, others of complete matrices.

    Parameters
    ----------
    A, ord, dim, keepdim, dtype
        As in ``torch.linalg.matrix_norm``.

    Returns
    -------
    Tensor
    """
    result_shape(torch.linalg.matrix_norm, A, ord, dim, keepdim, dtype=dtype)
    if ord == "fro":
        frobenius: torch.Tensor = torch.linalg.vector_norm(A, 2, dim, keepdim, dtype=dtype)
        return frobenius
    # Batched functions have their matrices last. So the dimensions of size one are inserted afterwards, in ascending
    # order, which puts each of them where it was.
    dims = [d % A.dim() for d in dim]
    norms: torch.Tensor = call_batched(torch.linalg.matrix_norm, [A.movedim(dims, (-2, -1))], [2], ord, dtype=dtype)
    for d in sorted(dims) if keepdim else ():
        norms = norms.unsqueeze(d)
    return norms


# -- along dimensions -------------------------------------------------------------------------------------------------


def _quantile(
    function: Callable[..., Any], input: DistTensor, q: Any, dim: Any = None, keepdim: bool = False, **named: Any
) -> DistTensor:
    """Compute ``torch.quantile`` or ``nanquantile`` along ``dim``."""
    result = result_shape(function, input, q, dim, keepdim, **named)
    if dim is None or isinstance(q, DistTensor):
        raise NoRule(
            f"{function.__name__} without dim=, or with distributed quantiles, has no distributed rule: flatten(1) "
            "and pass dim=1"
        )
    dim %= max(1, input.dim())
    x = all_to_all_transpose(input, [dim])
    if input.dist.split_axes and not x.dist.split_axes:
        raise NoRule(f"{function.__name__} along the only dimension that can be split: gather it first (dc.gather(x))")
    # Several quantiles are a new first dimension of the result.
    axes = [None if d == dim else axis for d, axis in enumerate(x.dist.axes) if keepdim or d != dim]
    several = isinstance(q, torch.Tensor) and q.dim() == 1
    dist = x.dist.with_axes([None, *axes] if several else axes)
    q = replicate_parameter(q, x.dist) if isinstance(q, torch.Tensor) else q
    y = run_like_other_ranks(lambda block: function(block, q, dim, keepdim, **named), dist.local_shape(result), x.local)
    return DistTensor(y, dist, result)


for _name in ("quantile", "nanquantile"):
    implements(
        getattr(torch, _name), getattr(torch.Tensor, _name), order=StridePolicy.NEW, tensors="input q", passes=None
    )(partial(_quantile, getattr(torch, _name)))


@implements(torch.linalg.cross, tensors="input other")
def linalg_cross(input: torch.Tensor, other: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
    """Compute ``torch.linalg.cross`` with each rank computing its part of the batch.

    Parameters
    ----------
    input, other, dim
        As in ``torch.linalg.cross``.

    Returns
    -------
    Tensor
    """
    result_shape(torch.linalg.cross, input, other, dim=dim)
    shape = torch.broadcast_shapes(input.shape, other.shape)
    both = [t.expand(shape).movedim(dim, -1) for t in (input, other)]
    product: torch.Tensor = call_batched(torch.linalg.cross, both, [1, 1]).movedim(-1, dim)
    return product


@implements(torch.cross, torch.Tensor.cross, tensors="input other")
def cross(input: torch.Tensor, other: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Compute ``torch.cross``: as :func:`linalg_cross`, but along the first dimension of size 3 without ``dim``.

    Parameters
    ----------
    input, other, dim
        As in ``torch.cross``.

    Returns
    -------
    Tensor
    """
    result_shape(torch.cross, input, other, dim)
    return linalg_cross(input, other, dim=input.shape.index(3) if dim is None else dim)


def _write_back_diagonal(view: DistTensor, input: DistTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> None:
    """Write a changed copy of a diagonal to ``input``. Collective."""
    # A copy: without a split `gathered` shares the memory of `input`, whose values autograd may need.
    gathered = input.replicated([dim1 % input.dim(), dim2 % input.dim()])
    changed = DistTensor(gathered.local.clone(), gathered.dist, gathered.shape)
    block = changed.local.diagonal(offset, dim1, dim2)
    block.copy_(view.redistribute(changed.dist.with_axes(_diagonal_axes(changed, dim1, dim2))).local)
    input.copy_(changed)


def _diagonal_axes(x: DistTensor, dim1: int, dim2: int) -> list[str | None]:
    """Return the axes of a diagonal of ``x``: those of the other dimensions, and None."""
    removed = (dim1 % x.dim(), dim2 % x.dim())
    return [*(axis for d, axis in enumerate(x.dist.axes) if d not in removed), None]


@implements(torch.diagonal, torch.Tensor.diagonal, kind=OperatorKind.VIEW, order=StridePolicy.NEW)
@takes_view(_write_back_diagonal)
def diagonal(input: DistTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ViewResult:
    """Compute ``torch.diagonal`` with both dimensions gathered; other dimensions stay split.

    Parameters
    ----------
    input, offset, dim1, dim2
        As in ``torch.diagonal``.

    Returns
    -------
    DistTensor
        A view.
    """
    shape = result_shape(torch.diagonal, input, offset, dim1, dim2)
    x = input.replicated([dim1 % input.dim(), dim2 % input.dim()])
    dist = x.dist.with_axes(_diagonal_axes(x, dim1, dim2))
    return DistTensor(x.local.diagonal(offset, dim1, dim2), dist, shape), x


@implements(torch.linalg.diagonal, kind=OperatorKind.VIEW, order=StridePolicy.NEW)
def linalg_diagonal(A: DistTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> DistTensor:
    """Compute ``torch.linalg.diagonal`` as :func:`diagonal`.

    Parameters
    ----------
    A, offset, dim1, dim2
        As in ``torch.linalg.diagonal``.

    Returns
    -------
    DistTensor
    """
    view: DistTensor = diagonal(A, offset, dim1, dim2)
    return view
