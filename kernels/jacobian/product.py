"""The product of sparse Jacobians: pairs of non-zeros are found once, their products computed at each iteration.

Source: BPPSA, 3.3: the mapping of the operands' non-zeros to the product's is known ahead of training.
"""

from __future__ import annotations

import torch

from .csr import Pattern, Product, SparseJacobian


def multiply(left: SparseJacobian, right: SparseJacobian) -> SparseJacobian:
    """Return the product of each sample, (N, K) by (K, M); pairs are found at the first product of two patterns."""
    products = left.pattern.products.get(right.pattern)
    if products is None:
        products = left.pattern.products[right.pattern] = meet(left.pattern, right.pattern)
    return SparseJacobian(products.pattern, products.values(left.values, right.values))


def pairs(left: Pattern, right: Pattern) -> int:
    """Return the number of products of two non-zeros in a matrix product; half of its FLOP."""
    return int(right.lengths[left.col].sum())


def meet(left: Pattern, right: Pattern) -> Product:
    """Return every pair of a non-zero (i, k) and a non-zero (k, j), sorted by (i, j)."""
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
