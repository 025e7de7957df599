"""Matrix products and other contractions.

Dimensions have labels, as in ``torch.einsum``, and operands are aligned by label (:func:`contract`). A label that
appears in the result keeps its split. If a label that is summed is split, each rank sums over its part, and the partial
sums are all-reduced. An operand that is replicated over an axis that splits the work gets its gradient all-reduced over
this axis. Norms, attention and recurrent layers call this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import StridePolicy, implements
from distconv.distribution import Distribution
from distconv.errors import NoRule
from distconv.grid import ProcessGrid, cached_on_grid
from distconv.layers.common.alignment import as_distributed, check_dtypes, redistribute_with_grad_reduce, result_shape
from distconv.layers.common.block_edges import boundaries_and_cyclic, distribution_from_edges
from distconv.layers.math.reductions import Fold, sum_over_ranks
from distconv.tensor import DistTensor

# -- contraction of operands with labelled dimensions -----------------------------------------------------------------


def contract(
    function: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    labels: Sequence[Sequence[str]],
    out: Sequence[str],
    shape: torch.Size,
    unsplit: Collection[str] = (),
) -> DistTensor:
    """Call a function that is a sum of products over labels.

    Collective: call on every rank.

    Parameters
    ----------
    function : callable
        Takes blocks of the operands, and returns the sum over their labels that are not in ``out``.
    operands : sequence of Tensor
        At least one is a DistTensor.
    labels : sequence of sequence of str
        The label of each dimension of each operand.
    out : sequence of str
        The label of each dimension of the result.
    shape : torch.Size
        Global shape of the result.
    unsplit : collection of str
        Labels that must not be split.

    Returns
    -------
    DistTensor
    """
    specs = []
    for tensor, names in zip(operands, labels, strict=True):
        dist = tensor.dist if isinstance(tensor, DistTensor) else None
        specs.append(_Operand(tensor.shape, tuple(names), dist, () if dist is None else dist.axes))
    first = next(operand.dist for operand in specs if operand.dist is not None)
    layouts, fold = _plan_contraction(first, tuple(specs), tuple(out), shape, frozenset(unsplit))
    blocks = [
        redistribute_with_grad_reduce(tensor, dist, axes)
        for tensor, (dist, axes) in zip(operands, layouts, strict=True)
    ]
    # If a summed label is split, blocks give partial sums, and their all-reduce is the product.
    return fold.wrap(sum_over_ranks(function(*blocks), fold))


def batch_labels(tensor: torch.Tensor, core_dims: int) -> list[str]:
    """Return labels for the batch dimensions of an operand.

    They are counted from the last one, so operands whose batches broadcast have equal labels.

    Parameters
    ----------
    tensor : Tensor
    core_dims : int
        Number of last dimensions that are not part of the batch.

    Returns
    -------
    list of str
    """
    return [f"batch {i}" for i in range(tensor.dim() - core_dims, 0, -1)]


@cached_on_grid
def _plan_contraction(
    first: Distribution,
    operands: tuple[_Operand, ...],
    out: tuple[str, ...],
    shape: torch.Size,
    unsplit: frozenset[str],
) -> tuple[list[tuple[Distribution, tuple[str, ...]]], Fold]:
    """Plan a contraction.

    For each operand, return its distribution and the axes that split the work but not the operand. Also return the
    reduction of the result.
    """
    distributed = [o for o in operands if o.dist is not None]
    extents: dict[str, int] = {}
    for operand in operands:
        for label, n in zip(operand.labels, operand.shape, strict=True):
            # A size of one is broadcast against the size of the other operand.
            extents[label] = n if extents.get(label, 1) == 1 else extents[label]
    plan = _ContractionPlan(first.grid, extents, {}, {}, {})
    # Axes that split a dimension come first. An axis of one rank does not split anything.
    for operand in distributed:
        assert operand.dist is not None
        plan.add_axes(operand, operand.dist.split, unsplit)
    for operand in distributed:
        plan.add_axes(operand, operand.axes, unsplit)
    plan.split_results_instead_of_sums(operands, out, shape, unsplit)
    layouts = []
    for operand in operands:
        dist = plan.distribution(operand.labels, operand.shape)
        # Over axes that do not split an operand its gradient is a sum: each rank sees other blocks of the product.
        layouts.append((dist, plan.grid.split_axes(a for a in plan.axis.values() if a not in dist.axes)))
    # Labels that are summed and split leave partial sums.
    reduced = plan.grid.split_axes(a for label, a in plan.axis.items() if label not in out)
    return layouts, Fold((), False, plan.grid, reduced, plan.distribution(out, shape), shape)


@dataclass(frozen=True)
class _ContractionPlan:
    """The grid axis that splits each label, with the boundaries of its blocks."""

    grid: ProcessGrid
    extents: dict[str, int]
    """Global size of each label."""
    axis: dict[str, str]
    """The grid axis that splits each label, for labels that are split."""
    boundaries: dict[str, Any]
    """Boundaries of axes with blocks that are not balanced."""
    cyclic: dict[str, int]
    """Block sizes of block-cyclic axes."""

    def add_axes(self, operand: _Operand, axes: Sequence[str | None], unsplit: Collection[str]) -> None:
        """Split labels by those of ``axes`` that are not used yet."""
        assert operand.dist is not None
        for label, axis, n in zip(operand.labels, axes, operand.shape, strict=True):
            # The first operand that splits a label decides, and an axis splits one label only.
            if axis is None or label in unsplit or label in self.axis or axis in self.axis.values():
                continue
            if self._can_split(operand.labels, label, n):
                self.axis[label] = axis
                # Boundaries refer to the ranks of a grid.
                if operand.dist.grid == self.grid:
                    boundaries, cyclic = boundaries_and_cyclic(operand.dist, (axis,))
                    self.boundaries.update(boundaries)
                    self.cyclic.update(cyclic)

    def split_results_instead_of_sums(
        self, operands: Sequence[_Operand], out: Sequence[str], shape: torch.Size, unsplit: Collection[str]
    ) -> None:
        """Split labels of the result by axes that split summed labels, where that sends less.

        It is possible if another operand is replicated over the axis, such as the weights of a sum over pixels: it is
        cut along the label at no cost. The operands that the axis splits are gathered, instead of an all-reduce of the
        result, which sends twice its size.
        """
        for summed, axis in [item for item in self.axis.items() if item[0] not in out]:
            with_label = [o for o in operands if summed in o.labels]
            split = [o for o in with_label if o.dist is not None and axis in o.dist.split]
            if not split:  # an axis of one rank
                continue
            free = {
                label: n
                for o in with_label
                if o not in split
                for label, n in zip(o.labels, o.shape, strict=True)
                if label in out and label not in (*self.axis, *unsplit) and self._can_split(o.labels, label, n)
            }
            label = max(free, key=free.__getitem__, default="")
            gathered = sum(o.shape.numel() for o in split)
            if free.get(label, 0) < self.grid.shape[axis] or gathered >= shape.numel():
                continue
            del self.axis[summed]
            self.axis[label] = axis
            # Blocks of pixels remain blocks of pixels; others are balanced.
            if self.extents[label] != self.extents[summed]:
                self.boundaries.pop(axis, None)
                self.cyclic.pop(axis, None)

    def _can_split(self, labels: Sequence[str], label: str, n: int) -> bool:
        """Return True if a dimension can be split by its label: it neither broadcasts nor is on a diagonal."""
        return n == self.extents[label] and labels.count(label) == 1

    def distribution(self, labels: Sequence[str], shape: Sequence[int]) -> Distribution:
        """Return the distribution of a tensor with these labels."""
        pairs = zip(labels, shape, strict=True)
        axes = [self.axis.get(label) if self._can_split(labels, label, n) else None for label, n in pairs]
        return distribution_from_edges(self.grid, axes, self.boundaries, self.cyclic)


@dataclass(frozen=True)
class _Operand:
    """Shape, labels and distribution of an operand; ``dist`` is None for a plain tensor."""

    shape: torch.Size
    labels: tuple[str, ...]
    dist: Distribution | None
    """Distribution; None for a plain tensor."""
    axes: tuple[str | None, ...]
    """Axes of ``dist``, including axes of one rank, which ``dist.split`` omits; empty for a plain tensor."""


# -- operators --------------------------------------------------------------------------------------------------------


@implements(
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.linalg.matmul,
    order=StridePolicy.NEW,
    tensors=None,
    passes=None,
)
def matmul(input: torch.Tensor, other: torch.Tensor) -> DistTensor:
    """Compute ``torch.matmul`` as a contraction.

    Parameters
    ----------
    input, other
        As in ``torch.matmul``.

    Returns
    -------
    DistTensor
    """
    return _matrix_product(torch.matmul, input, other)


def _matrix_product(function: Callable[..., torch.Tensor], input: torch.Tensor, other: torch.Tensor) -> DistTensor:
    """Compute ``torch.matmul`` or a variant; under ``torch.autocast`` not all of these compute in half precision."""
    check_dtypes(function, input, other)
    shape = result_shape(function, input, other)
    left = [*batch_labels(input, 2), "m", "k"] if input.dim() > 1 else ["k"]
    right = [*batch_labels(other, 2), "k", "n"] if other.dim() > 1 else ["k"]
    batch = max(batch_labels(input, 2), batch_labels(other, 2), key=len)
    out = [*batch, *(["m"] if input.dim() > 1 else []), *(["n"] if other.dim() > 1 else [])]
    return contract(function, (input, other), (left, right), out, shape)


def _accept_names(operator: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Return ``operator`` such that its tensors may also be passed by torch's ``names`` for them."""

    def call(*args: Any, **named: Any) -> Any:
        tensors = [*args, *(named.pop(name) for name in names[len(args) :] if name in named)]
        return operator(*tensors, **named)

    return call


for _name, _second in (("mm", "mat2"), ("bmm", "mat2"), ("mv", "vec"), ("dot", "tensor")):
    for _function in {getattr(h, _name) for h in (torch, torch.Tensor)}:
        implements(_function, tensors=None, passes=None)(
            _accept_names(partial(_matrix_product, getattr(torch, _name)), "input", _second)
        )


@implements(torch.Tensor.__rmatmul__, order=StridePolicy.NEW, tensors=None, passes=None)
def rmatmul(input: torch.Tensor, other: torch.Tensor) -> DistTensor:
    """Compute ``other @ input``.

    Parameters
    ----------
    input, other
        As in ``torch.Tensor.__rmatmul__``.

    Returns
    -------
    DistTensor
    """
    return matmul(other, input)


@implements(torch.outer, torch.Tensor.outer, torch.ger, torch.Tensor.ger, tensors=None)
def outer(input: torch.Tensor, vec2: torch.Tensor) -> DistTensor:
    """Compute ``torch.outer`` as a contraction.

    Parameters
    ----------
    input, vec2
        As in ``torch.outer``.

    Returns
    -------
    DistTensor
    """
    shape = result_shape(torch.outer, input, vec2)
    return contract(torch.outer, (input, vec2), (["m"], ["n"]), ["m", "n"], shape)


def _add_product(
    function: Any,
    product: Any,
    input: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """Compute ``beta * input + alpha * product(first, second)``; with ``beta`` 0 torch ignores ``input``, even NaN."""
    result_shape(function, input, first, second, beta=beta, alpha=alpha)
    result: torch.Tensor = product(first, second)
    # The operands of the product may all be plain.
    if isinstance(input, DistTensor):
        result = as_distributed(result, input.grid)
    if torch._C._is_any_autocast_enabled():
        input = input.to(result.dtype)
    result = result if alpha == 1 else result * alpha
    if beta == 0:
        # The values of input do not matter, not even NaN, but its gradient must be zero instead of None.
        return result + input.masked_fill(input.new_ones((), dtype=torch.bool), 0)
    return result + (input if beta == 1 else input * beta)


for _name, _product, _operands in (
    ("addmm", torch.matmul, ("mat1", "mat2")),
    ("addmv", torch.matmul, ("mat", "vec")),
    ("baddbmm", torch.matmul, ("batch1", "batch2")),
    ("addbmm", partial(torch.einsum, "bij,bjk->ik"), ("batch1", "batch2")),
    ("addr", torch.outer, ("vec1", "vec2")),
):
    for _function in (getattr(torch, _name), getattr(torch.Tensor, _name)):
        implements(_function, tensors=None, passes=None)(
            _accept_names(partial(_add_product, getattr(torch, _name), _product), "input", *_operands)
        )


@implements(torch.vdot, torch.Tensor.vdot, tensors=None)
def vdot(input: torch.Tensor, other: torch.Tensor) -> DistTensor:
    """Compute ``torch.vdot`` as a contraction.

    Parameters
    ----------
    input, other
        As in ``torch.vdot``.

    Returns
    -------
    DistTensor
    """
    return matmul(input.conj(), other)


@implements(torch.linalg.vecdot, tensors="x y")
def vecdot(x: torch.Tensor, y: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
    """Compute ``torch.linalg.vecdot`` as an elementwise product and a sum.

    Parameters
    ----------
    x, y, dim
        As in ``torch.linalg.vecdot``.

    Returns
    -------
    Tensor
    """
    result_shape(torch.linalg.vecdot, x, y, dim=dim)
    return (x.conj() * y).sum(dim)


@implements(torch.einsum, order=StridePolicy.NEW, tensors=None, passes=None)
def einsum(equation: str, *operands: torch.Tensor) -> DistTensor:
    """Compute ``torch.einsum`` as a contraction.

    Parameters
    ----------
    equation, *operands
        As in ``torch.einsum``.

    Returns
    -------
    DistTensor
    """
    shape = result_shape(torch.einsum, equation, *operands)
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    labels = [
        _term_labels(term, t.dim() - len(term.replace("...", ""))) for term, t in zip(terms, operands, strict=True)
    ]
    dots = max((list(filter(_is_ellipsis_label, names)) for names in labels), key=len)
    # Without an arrow, labels that appear once, in alphabetical order, follow the dimensions of the ellipsis.
    if arrow:
        letters = _term_labels(output, len(dots))
    else:
        every = [name for names in labels for name in names if not _is_ellipsis_label(name)]
        letters = [*dots, *sorted(name for name in every if every.count(name) == 1)]
    return contract(partial(torch.einsum, equation), operands, labels, letters, shape)


def _is_ellipsis_label(name: str) -> bool:
    """Return True if the label stands for a dimension of ``...``."""
    return name.startswith(".")


def _term_labels(term: str, count: int) -> list[str]:
    """Return the labels of a term in which ``...`` stands for ``count`` dimensions."""
    before, dots, after = term.partition("...")
    return [*before, *(f".{i}" for i in range(count if dots else 0, 0, -1)), *after]


@implements(torch.tensordot, order=StridePolicy.NEW, tensors=None, passes=None)
def tensordot(a: torch.Tensor, b: torch.Tensor, dims: Any = 2, out: None = None) -> DistTensor:
    """Compute ``torch.tensordot`` as a contraction.

    Parameters
    ----------
    a, b, dims, out
        As in ``torch.tensordot``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        With ``out=``, or a tensor as ``dims``.
    """
    if out is not None or isinstance(dims, torch.Tensor):
        raise NoRule(
            "torch.tensordot with out=, or with a tensor as dims=, has no distributed rule: pass dims as integers, "
            "and assign the result"
        )
    shape = result_shape(torch.tensordot, a, b, dims)
    # A number stands for the last dimensions of a and the first ones of b. Contracted dimensions share a label.
    pairs = (range(a.dim() - dims, a.dim()), range(dims)) if isinstance(dims, int) else dims
    pairs = [[d] if isinstance(d, int) else list(d) for d in pairs]
    left, right = [f"a{d}" for d in range(a.dim())], [f"b{d}" for d in range(b.dim())]
    for one, other in zip(*pairs, strict=True):
        right[other % b.dim()] = left[one % a.dim()]
    summed_over = set(left) & set(right)
    labels = [name for name in (*left, *right) if name not in summed_over]
    return contract(partial(torch.tensordot, dims=dims), (a, b), (left, right), labels, shape)


@implements(F.bilinear, torch.bilinear, tensors=None, passes=None)
def bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``F.bilinear`` as a contraction.

    Parameters
    ----------
    input1, input2, weight, bias
        As in ``F.bilinear``.

    Returns
    -------
    Tensor
    """
    shape = result_shape(F.bilinear, input1, input2, weight, bias)
    batch = batch_labels(input1, 1)
    labels = ([*batch, "i"], [*batch, "j"], ["o", "i", "j"])

    def product(*blocks: torch.Tensor) -> torch.Tensor:
        # Not torch.bilinear, which rejects blocks without features. As there, autocast does not lower the precision.
        with torch.autocast(blocks[0].device.type, enabled=False):
            return torch.einsum("...i,...j,oij->...o", *blocks)

    result = contract(product, (input1, input2, weight), labels, [*batch, "o"], shape)
    return result if bias is None else result + bias
