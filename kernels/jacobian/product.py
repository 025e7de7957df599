"""The product of sparse Jacobians: which pairs of non-zeros meet is found once, what they come to at each iteration.

Source: BPPSA, 3.3: the mapping of the operands' non-zeros to the product's is known ahead of training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .csr import Pattern, SparseJacobian

PAIRS_AT_ONCE = 1 << 26
"""Terms that are computed before they are added up: memory, against calls."""


@dataclass(frozen=True, eq=False)
class Product:
    """Which non-zeros of the factors meet (``left``, ``right``) and the non-zero of the product each pair goes to.

    ``out`` is None where every non-zero of the product has one pair, in order.
    """

    pattern: Pattern
    left: torch.Tensor
    right: torch.Tensor
    out: torch.Tensor | None

    def values(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Values of the product (B, nnz) from those of its factors."""
        if self.out is None:
            return left.index_select(1, self.left) * right.index_select(1, self.right)
        batch = max(len(left), len(right))
        total = left.new_zeros(batch, self.pattern.nnz)
        step = max(1, PAIRS_AT_ONCE // batch)
        for a, b, out in zip(self.left.split(step), self.right.split(step), self.out.split(step), strict=True):
            total.index_add_(1, out, left.index_select(1, a) * right.index_select(1, b))
        return total


def multiply(left: SparseJacobian, right: SparseJacobian) -> SparseJacobian:
    """The product of each sample, (N, K) by (K, M); the pairs are found at its patterns' first product."""
    products = left.pattern.products.get(right.pattern)
    if products is None:
        products = left.pattern.products[right.pattern] = meet(left.pattern, right.pattern)
    return SparseJacobian(products.pattern, products.values(left.values, right.values))


def pairs(left: Pattern, right: Pattern) -> int:
    """How many products of two non-zeros their product takes; half of its FLOP."""
    return int(right.lengths[left.col].sum())


def meet(left: Pattern, right: Pattern) -> Product:
    """Every pair of a non-zero (i, k) with one of (k, j), sorted by (i, j)."""
    device = left.col.device
    counts = right.lengths[left.col]
    total = int(counts.sum())
    first = torch.repeat_interleave(counts, output_size=total)
    begins = right.crow[left.col] - (counts.cumsum(0) - counts)
    second = begins[first] + torch.arange(total, device=device)
    keys, order = (left.rows[first] * right.shape[1] + right.col[second]).sort()
    places, out = torch.unique_consecutive(keys, return_inverse=True)
    shape = (left.shape[0], right.shape[1])
    rows = places // shape[1]
    crow = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.bincount(rows, minlength=shape[0]), 0, out=crow[1:])
    pattern = Pattern(crow, places - rows * shape[1], shape)
    return Product(pattern, first[order], second[order], None if len(places) == total else out)
