"""Sparse transposed Jacobians and their products: one pattern for all samples, and values for each of them or for all.

A pattern is made once for a shape and cached. So are the pairs of non-zeros that meet in the product of two patterns
(:func:`multiply`). An iteration then only computes values. :mod:`distconv.kernels.scan` calls this module, which
depends neither on layers nor on ranks.

Source: BPPSA, 3.3: the mapping of the operands' non-zeros to those of the product is known before training.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache, cached_property
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

MAX_PAIRS_AT_ONCE = 1 << 26
"""Maximum number of terms that are in memory before they are added up: more need fewer calls, but more memory."""


class Pattern:
    """Positions of the possible non-zeros of a matrix, in compressed rows.

    Patterns are compared by identity: two with the same positions are different. So the functions that make them cache
    them, and the product of two patterns is found once (:func:`multiply`).

    Parameters
    ----------
    crow : Tensor
        int64 (rows + 1,).
    col : Tensor
        int64 (nnz,), the columns of each row in ascending order.
    shape : tuple of int
        Rows and columns.
    """

    def __init__(self, crow: torch.Tensor, col: torch.Tensor, shape: tuple[int, int]) -> None:
        self.crow, self.col, self.shape = crow, col, shape
        self.products: WeakKeyDictionary[Pattern, Product] = WeakKeyDictionary()

    @classmethod
    def from_positions(
        cls, rows: torch.Tensor, cols: torch.Tensor, shape: tuple[int, int]
    ) -> tuple[Pattern, torch.Tensor]:
        """Return the pattern of distinct positions in any order, and the order that sorts them.

        Parameters
        ----------
        rows, cols : Tensor
            int64 (nnz,), the positions.
        shape : tuple of int
            Rows and columns of the matrix.

        Returns
        -------
        tuple of (Pattern, Tensor)
            The order is int64 (nnz,).
        """
        # One key for both indices: sorted by row, and within a row by column.
        _, order = (rows * shape[1] + cols).sort()
        crow = torch.zeros(shape[0] + 1, dtype=torch.int64, device=rows.device)
        torch.cumsum(torch.bincount(rows, minlength=shape[0]), 0, out=crow[1:])
        return cls(crow, cols[order], shape), order

    @property
    def nnz(self) -> int:
        """Number of positions."""
        return len(self.col)

    @property
    def sparsity(self) -> float:
        """Fraction of elements that are always zero."""
        return 1 - self.nnz / (self.shape[0] * self.shape[1])

    @property
    def index_bytes(self) -> int:
        """Memory of the two arrays in bytes."""
        return self.crow.nbytes + self.col.nbytes

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Number of non-zeros of each row (rows,)."""
        return self.crow.diff()

    @cached_property
    def rows(self) -> torch.Tensor:
        """The row of each non-zero (nnz,)."""
        # With the size given, the host does not wait for a GPU to compute it.
        return torch.repeat_interleave(self.lengths, output_size=self.nnz)

    @cached_property
    def diagonal(self) -> bool:
        """True for the pattern of a diagonal matrix."""
        return self.shape[0] == self.shape[1] == self.nnz and bool((self.rows == self.col).all())

    @cached_property
    def transposed(self) -> tuple[Pattern, torch.Tensor]:
        """The pattern of the transpose, and the order of this pattern's non-zeros in it."""
        return Pattern.from_positions(self.col, self.rows, self.shape[::-1])


@dataclass(frozen=True, eq=False)
class Product:
    """Which non-zeros of the factors meet (``left``, ``right``) and the non-zero of the product each pair goes to.

    ``out`` is None where every non-zero of the product has one pair, in order.
    """

    pattern: Pattern
    left: torch.Tensor
    right: torch.Tensor
    out: torch.Tensor | None

    def evaluate(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the values of the product (B, nnz), given those of its factors.

        Parameters
        ----------
        left, right : Tensor
            Values of the factors (B or 1, nnz).

        Returns
        -------
        Tensor
        """
        # Each non-zero of the product is a single term: nothing has to be added up.
        if self.out is None:
            return left.index_select(1, self.left) * right.index_select(1, self.right)
        batch = max(len(left), len(right))
        total = left.new_zeros(batch, self.pattern.nnz)
        step = max(1, MAX_PAIRS_AT_ONCE // batch)
        for a, b, out in zip(self.left.split(step), self.right.split(step), self.out.split(step), strict=True):
            total.index_add_(1, out, left.index_select(1, a) * right.index_select(1, b))
        return total


_known: WeakValueDictionary[tuple[int, ...], Pattern] = WeakValueDictionary()
"""Patterns of torch CSR matrices, by the addresses of their indices: ``from_torch`` reuses them.

A pattern owns its indices, and is removed from here when it is freed. So no other matrix has their addresses.
"""


@dataclass(frozen=True, eq=False)
class SparseJacobian:
    """A transposed Jacobian J = (dy/dx)^T (N_in, N_out) of each sample."""

    pattern: Pattern
    values: torch.Tensor
    """Shape (B, nnz), or (1, nnz) if all samples have the same."""

    @classmethod
    def from_torch(cls, matrix: torch.Tensor) -> SparseJacobian:
        """Return the Jacobian of a torch CSR matrix (N_in, N_out), sharing values, and the pattern if it is known."""
        crow, col = matrix.crow_indices(), matrix.col_indices()
        # The same pattern as in earlier iterations: its products with other patterns were computed then.
        pattern = _known.get((crow.data_ptr(), col.data_ptr(), *matrix.shape))
        if pattern is None:
            pattern = Pattern(crow.long(), col.long(), (matrix.shape[0], matrix.shape[1]))
        return cls(pattern, matrix.values()[None])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (B or 1, N_in, N_out)."""
        return (len(self.values), *self.pattern.shape)

    @property
    def transposed(self) -> SparseJacobian:
        """The transpose, of shape (B or 1, N_out, N_in)."""
        pattern, order = self.pattern.transposed
        return SparseJacobian(pattern, self.values[:, order])

    def to_torch(self) -> torch.Tensor:
        """Return a torch CSR matrix (N_in, N_out); for several samples (B, N_in, N_out) with repeated indices."""
        _skip_beta_warning()
        pattern, batch = self.pattern, len(self.values)
        crow, col, values, shape = pattern.crow, pattern.col, self.values[0], pattern.shape
        if batch == 1:
            _known[(crow.data_ptr(), col.data_ptr(), *shape)] = pattern
            # The pattern is valid by construction, and torch's check would read all of it.
            return torch.sparse_csr_tensor(crow, col, values, shape, check_invariants=False)
        crow, col = crow.repeat(batch, 1), col.repeat(batch, 1)
        return torch.sparse_csr_tensor(crow, col, self.values, self.shape, check_invariants=False)

    def to_dense(self) -> torch.Tensor:
        """Return a dense tensor (B or 1, N_in, N_out)."""
        batch, rows, cols = self.shape
        out = self.values.new_zeros(batch, rows * cols)
        out[:, self.pattern.rows * cols + self.pattern.col] = self.values
        return out.view(batch, rows, cols)

    def apply(self, vector: torch.Tensor) -> torch.Tensor:
        """Return J g of each sample: (B, N_out) -> (B, N_in)."""
        pattern = self.pattern
        if pattern.diagonal:
            return self.values * vector
        if len(self.values) == 1 < len(vector):
            # All samples share the matrix: one product of a sparse and a dense matrix.
            return (self.to_torch() @ vector.t()).t()
        terms = self.values * vector.index_select(1, pattern.col)
        return terms.new_zeros(len(terms), pattern.shape[0]).index_add_(1, pattern.rows, terms)

    def times_dense(self, other: torch.Tensor) -> torch.Tensor:
        """Return J D of each sample: (B or 1, N_out, K) -> (B or 1, N_in, K)."""
        batch, inner, cols = other.shape
        pattern = self.pattern
        if pattern.diagonal:
            return self.values[:, :, None] * other
        if len(self.values) == 1:
            wide = self.to_torch() @ other.transpose(0, 1).reshape(inner, batch * cols)
            return wide.view(-1, batch, cols).transpose(0, 1)
        terms = self.values[:, :, None] * other.index_select(1, pattern.col)
        return terms.new_zeros(len(terms), pattern.shape[0], cols).index_add_(1, pattern.rows, terms)


# -- products --------------------------------------------------------------------------------------------------------


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
    # For each non-zero (i, k) of the left factor, the number of non-zeros (k, j) of the right one.
    counts = right.lengths[left.col]
    total = int(counts.sum())
    # The pairs: each left non-zero as often as it has partners, and with it consecutive right ones.
    first = torch.repeat_interleave(counts, output_size=total)
    begins = right.crow[left.col] - (counts.cumsum(0) - counts)
    second = begins[first] + torch.arange(total, device=device)
    # Sorted by position in the product. Pairs of one position are neighbours then.
    keys, order = (left.rows[first] * right.shape[1] + right.col[second]).sort()
    positions, out = torch.unique_consecutive(keys, return_inverse=True)
    shape = (left.shape[0], right.shape[1])
    # Compressed rows of the product.
    rows = positions // shape[1]
    crow = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.bincount(rows, minlength=shape[0]), 0, out=crow[1:])
    pattern = Pattern(crow, positions - rows * shape[1], shape)
    # If no two pairs meet at one position, no sums are needed.
    return Product(pattern, first[order], second[order], None if len(positions) == total else out)


@cache
def _skip_beta_warning() -> None:
    """Trigger the warning that CSR tensors are in beta, which torch raises once in a process, and drop it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()
