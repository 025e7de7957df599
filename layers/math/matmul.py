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
from distconv.layers.common.alignment import as_distributed, check_dtypes, entering, result_shape
from distconv.layers.common.block_edges import irregular, layout
from distconv.layers.math.reductions import Fold, summed
from distconv.tensor import DistTensor


@dataclass(frozen=True)
class _Operand:
    """Shape, labels and distribution of an operand; ``dist`` is None for a plain tensor."""

    shape: torch.Size
    labels: tuple[str, ...]
    dist: Distribution | None
    """Distribution; None for a plain tensor."""
    axes: tuple[str | None, ...]
    """Axes of ``dist``, including axes of one rank, which ``dist.split`` omits; empty for a plain tensor."""


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

    def adopt(self, operand: _Operand, axes: Sequence[str | None], whole: Collection[str]) -> None:
        """Adopt those of ``axes`` that split a label, if neither the label nor the axis is taken."""
        assert operand.dist is not None
        for label, axis, n in zip(operand.labels, axes, operand.shape, strict=True):
            if axis is None or label in whole or label in self.axis or axis in self.axis.values():
                continue
            if self._splits(operand.labels, label, n):
                self.axis[label] = axis
                if operand.dist.grid == self.grid:
                    boundaries, cyclic = irregular(operand.dist, (axis,))
                    self.boundaries.update(boundaries)
                    self.cyclic.update(cyclic)

    def _splits(self, labels: Sequence[str], label: str, n: int) -> bool:
        """Return True if a dimension can be split by its label: it neither broadcasts nor is on a diagonal."""
        return n == self.extents[label] and labels.count(label) == 1

    def layout(self, labels: Sequence[str], shape: Sequence[int]) -> Distribution:
        """Return the distribution of a tensor with these labels."""
        pairs = zip(labels, shape, strict=True)
        axes = [self.axis.get(label) if self._splits(labels, label, n) else None for label, n in pairs]
        return layout(self.grid, axes, self.boundaries, self.cyclic)


@cached_on_grid
def _work(
    first: Distribution, operands: tuple[_Operand, ...], out: tuple[str, ...], shape: torch.Size, whole: frozenset[str]
) -> tuple[list[tuple[Distribution, tuple[str, ...]]], Fold]:
    """Plan a contraction.

    For each operand, return its distribution and the axes that split the work but not the operand. Also return the
    reduction of the result.
    """
    placed = [o for o in operands if o.dist is not None]
    extents: dict[str, int] = {}
    for operand in operands:
        for label, n in zip(operand.labels, operand.shape, strict=True):
            extents[label] = n if extents.get(label, 1) == 1 else extents[label]
    work = _ContractionPlan(first.grid, extents, {}, {}, {})
    # Axes that split a dimension come first. An axis of one rank does not split anything.
    for operand in placed:
        assert operand.dist is not None
        work.adopt(operand, operand.dist.split, whole)
    for operand in placed:
        work.adopt(operand, operand.axes, whole)
    places = []
    for operand in operands:
        dist = work.layout(operand.labels, operand.shape)
        places.append((dist, work.grid.split_axes(a for a in work.axis.values() if a not in dist.axes)))
    crossed = work.grid.split_axes(a for label, a in work.axis.items() if label not in out)
    return places, Fold((), False, work.grid, crossed, work.layout(out, shape), shape)


def contract(
    function: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    labels: Sequence[Sequence[str]],
    out: Sequence[str],
    shape: torch.Size,
    whole: Collection[str] = (),
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
    whole : collection of str
        Labels that must not be split.

    Returns
    -------
    DistTensor
    """
    described = []
    for tensor, names in zip(operands, labels, strict=True):
        dist = tensor.dist if isinstance(tensor, DistTensor) else None
        described.append(_Operand(tensor.shape, tuple(names), dist, () if dist is None else dist.axes))
    first = next(operand.dist for operand in described if operand.dist is not None)
    places, fold = _work(first, tuple(described), tuple(out), shape, frozenset(whole))
    blocks = [entering(tensor, dist, axes) for tensor, (dist, axes) in zip(operands, places, strict=True)]
    return fold.wrap(summed(function(*blocks), fold))


def batch_labels(tensor: torch.Tensor, own: int) -> list[str]:
    """Return labels for the batch dimensions of an operand.

    They are counted from the last one, so operands whose batches broadcast have equal labels.

    Parameters
    ----------
    tensor : Tensor
    own : int
        Number of last dimensions that are not part of the batch.

    Returns
    -------
    list of str
    """
    return [f"batch {i}" for i in range(tensor.dim() - own, 0, -1)]


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
    """Compute ``torch.matmul`` as a contraction. Parameters as in torch."""
    return _multiplied(torch.matmul, input, other)


def _multiplied(function: Callable[..., torch.Tensor], input: torch.Tensor, other: torch.Tensor) -> DistTensor:
    """Compute ``torch.matmul`` or a variant; under ``torch.autocast`` not all of these compute in half precision."""
    check_dtypes(function, input, other)
    shape = result_shape(function, input, other)
    left = [*batch_labels(input, 2), "m", "k"] if input.dim() > 1 else ["k"]
    right = [*batch_labels(other, 2), "k", "n"] if other.dim() > 1 else ["k"]
    batch = max(batch_labels(input, 2), batch_labels(other, 2), key=len)
    out = [*batch, *(["m"] if input.dim() > 1 else []), *(["n"] if other.dim() > 1 else [])]
    return contract(function, (input, other), (left, right), out, shape)


def _by_name(operator: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Return ``operator`` such that its tensors may also be passed by torch's ``names`` for them."""

    def call(*given: Any, **named: Any) -> Any:
        tensors = [*given, *(named.pop(name) for name in names[len(given) :] if name in named)]
        return operator(*tensors, **named)

    return call


for _name, _second in (("mm", "mat2"), ("bmm", "mat2"), ("mv", "vec"), ("dot", "tensor")):
    for _function in {getattr(h, _name) for h in (torch, torch.Tensor)}:
        implements(_function, tensors=None, passes=None)(
            _by_name(partial(_multiplied, getattr(torch, _name)), "input", _second)
        )


@implements(torch.Tensor.__rmatmul__, order=StridePolicy.NEW, tensors=None, passes=None)
def rmatmul(input: torch.Tensor, other: torch.Tensor) -> DistTensor:
    """Compute ``other @ input``. Parameters as in torch."""
    return matmul(other, input)


@implements(torch.outer, torch.Tensor.outer, torch.ger, torch.Tensor.ger, tensors=None)
def outer(input: torch.Tensor, vec2: torch.Tensor) -> DistTensor:
    """Compute ``torch.outer`` as a contraction. Parameters as in torch."""
    shape = result_shape(torch.outer, input, vec2)
    return contract(torch.outer, (input, vec2), (["m"], ["n"]), ["m", "n"], shape)


def _plus(
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
            _by_name(partial(_plus, getattr(torch, _name), _product), "input", *_operands)
        )


@implements(torch.vdot, torch.Tensor.vdot, tensors=None)
def vdot(input: torch.Tensor, other: torch.Tensor) -> DistTensor:
    """Compute ``torch.vdot`` as a contraction. Parameters as in torch."""
    return matmul(input.conj(), other)


@implements(torch.linalg.vecdot, tensors="x y")
def vecdot(x: torch.Tensor, y: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
    """Compute ``torch.linalg.vecdot`` as an elementwise product and a sum. Parameters as in torch."""
    result_shape(torch.linalg.vecdot, x, y, dim=dim)
    return (x.conj() * y).sum(dim)


@implements(torch.einsum, order=StridePolicy.NEW, tensors=None, passes=None)
def einsum(equation: str, *operands: torch.Tensor) -> DistTensor:
    """Compute ``torch.einsum`` as a contraction. Parameters as in torch."""
    shape = result_shape(torch.einsum, equation, *operands)
    given, arrow, wanted = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    labels = [_spelled(term, t.dim() - len(term.replace("...", ""))) for term, t in zip(terms, operands, strict=True)]
    dots = max((list(filter(_of_dots, names)) for names in labels), key=len)
    if arrow:
        letters = _spelled(wanted, len(dots))
    else:
        every = [name for names in labels for name in names if not _of_dots(name)]
        letters = [*dots, *sorted(name for name in every if every.count(name) == 1)]
    return contract(partial(torch.einsum, equation), operands, labels, letters, shape)


def _of_dots(name: str) -> bool:
    """Return True if the label stands for a dimension of ``...``."""
    return name.startswith(".")


def _spelled(term: str, count: int) -> list[str]:
    """Return the labels of a term in which ``...`` stands for ``count`` dimensions."""
    before, dots, after = term.partition("...")
    return [*before, *(f".{i}" for i in range(count if dots else 0, 0, -1)), *after]


@implements(torch.tensordot, order=StridePolicy.NEW, tensors=None, passes=None)
def tensordot(a: torch.Tensor, b: torch.Tensor, dims: Any = 2, out: None = None) -> DistTensor:
    """Compute ``torch.tensordot`` as a contraction. Parameters as in torch.

    Raises
    ------
    NoRule
        With ``out=``, or a tensor as ``dims``.
    """
    if out is not None or isinstance(dims, torch.Tensor):
        raise NoRule("torch.tensordot with out= or with a tensor as dims=: use numbers, assign the result")
    shape = result_shape(torch.tensordot, a, b, dims)
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
    """Compute ``F.bilinear`` as a contraction. Parameters as in torch."""
    shape = result_shape(F.bilinear, input1, input2, weight, bias)
    batch = batch_labels(input1, 1)
    labels = ([*batch, "i"], [*batch, "j"], ["o", "i", "j"])

    def product(*blocks: torch.Tensor) -> torch.Tensor:
        # Not torch.bilinear, which rejects blocks without features. As there, autocast does not lower the precision.
        with torch.autocast(blocks[0].device.type, enabled=False):
            return torch.einsum("...i,...j,oij->...o", *blocks)

    result = contract(product, (input1, input2, weight), labels, [*batch, "o"], shape)
    return result if bias is None else result + bias
