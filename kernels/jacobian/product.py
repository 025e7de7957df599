"""Products of sparse Jacobians.

The pairs of non-zeros are found once for two patterns. Their products are computed at each iteration.
:mod:`distconv.kernels.scan` calls this module. It depends on patterns and values only, not on layers or ranks.

Source: BPPSA, 3.3: the mapping of the operands' non-zeros to those of the product is known before training.
"""

from __future__ import annotations

import torch

from .csr import Pattern, Product, SparseJacobian


def multiply(left: SparseJacobian, right: SparseJacobian) -> SparseJacobian:
    """Return the matrix product of each sample.

    The pairs of non-zeros are found at the first product of two patterns, and are kept with the left pattern.

    Parameters
    ----------
    left : SparseJacobian
        Pattern (N, K).
    right : SparseJacobian
        Pattern (K, M).

    Returns
    -------
    SparseJacobian
        Pattern (N, M).
    """
    products = left.pattern.products.get(right.pattern)
    if products is None:
        products = left.pattern.products[right.pattern] = match_nonzeros(left.pattern, right.pattern)
    return SparseJacobian(products.pattern, products.evaluate(left.values, right.values))


def count_products(left: Pattern, right: Pattern) -> int:
    """Return the number of products of two non-zeros in a matrix product, which is half of its FLOP.

    Parameters
    ----------
    left, right : Pattern
        Patterns (N, K) and (K, M).

    Returns
    -------
    int
        The number for one sample.
    """
    return int(right.lengths[left.col].sum())


def match_nonzeros(left: Pattern, right: Pattern) -> Product:
    """Return every pair of a non-zero (i, k) and a non-zero (k, j), sorted by (i, j).

    Parameters
    ----------
    left, right : Pattern
        Patterns (N, K) and (K, M), on one device.

    Returns
    -------
    Product
        The pattern (N, M) of the product, and the non-zeros of both operands in each pair.
    """
    device = left.col.device
    # [1] For each non-zero (i, k) of the left factor, the number of non-zeros (k, j) of the right one.
    counts = right.lengths[left.col]
    total = int(counts.sum())
    # [2] The pairs: each left non-zero as often as it has partners, and with it consecutive right ones.
    first = torch.repeat_interleave(counts, output_size=total)
    begins = right.crow[left.col] - (counts.cumsum(0) - counts)
    second = begins[first] + torch.arange(total, device=device)
    # [3] Sorted by position in the product. Pairs of one position are neighbours then.
    keys, order = (left.rows[first] * right.shape[1] + right.col[second]).sort()
    positions, out = torch.unique_consecutive(keys, return_inverse=True)
    shape = (left.shape[0], right.shape[1])
    # [4] Compressed rows of the product.
    rows = positions // shape[1]
    crow = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.bincount(rows, minlength=shape[0]), 0, out=crow[1:])
    pattern = Pattern(crow, positions - rows * shape[1], shape)
    # If no two pairs meet at one position, no sums are needed.
    return Product(pattern, first[order], second[order], None if len(positions) == total else out)
