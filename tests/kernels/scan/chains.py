"""Chains of Jacobians, and what one product after another makes of a gradient."""

from __future__ import annotations

import torch

from distconv.distribution import block_range
from distconv.kernels.jacobian import Pattern, SparseJacobian

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stack(n, samples=2, width=4, seed=0):
    """(n, samples, N, N), scaled so that products of many neither vanish nor overflow."""
    return normal(n, samples, width, width, seed=seed) / width**0.5


def csr(dense, batch=1):
    """The same matrix (N_in, N_out) as a SparseJacobian; with ``batch`` samples, the s-th s + 1 times as large."""
    rows, cols = dense.nonzero(as_tuple=True)
    pattern, order = Pattern.from_positions(rows, cols, tuple(dense.shape))
    factors = torch.arange(1, batch + 1, dtype=dense.dtype)[:, None]
    return SparseJacobian(pattern, factors * dense[rows, cols][order])


def mixed(n, samples=2, seed=0):
    """``n`` matrices of changing widths, dense for one or all samples and sparse for one or all, half of each zero."""
    widths = [3 + (seed + 5 * i) % 4 for i in range(n + 1)]
    found = []
    for i in range(n):
        dense = normal(samples, widths[i + 1], widths[i], seed=seed + i) / widths[i] ** 0.5
        dense[:, (torch.arange(widths[i + 1])[:, None] + torch.arange(widths[i])) % 2 == 0] = 0
        kind = (i + seed) % 4
        if kind == 0:
            found.append(dense)
        elif kind == 1:
            found.append(dense[0])
        elif kind == 2:
            found.append(csr(dense[0]).to_torch() if i == 2 else csr(dense[0]))
        else:
            found.append(csr(dense[0] / samples, samples))
    return widths[0], found


def dense_of(matrix):
    """(B or 1, N_in, N_out)."""
    if isinstance(matrix, SparseJacobian):
        return matrix.to_dense()
    matrix = matrix.to_dense() if matrix.layout == torch.sparse_csr else matrix
    return matrix if matrix.dim() == 3 else matrix[None]


def backpropagate_in_order(gradient, matrices, sources=None):
    """Eq. 3, a product of plain torch for each."""
    out = []
    for i, matrix in enumerate(matrices):
        gradient = (dense_of(matrix) @ gradient[:, :, None])[:, :, 0]
        if sources is not None and sources[i] is not None:
            gradient = gradient + sources[i]
        out.append(gradient)
    return out


def assert_close(found, expected):
    assert [tuple(each.shape) for each in found] == [tuple(each.shape) for each in expected]
    if len(expected):
        found, expected = (torch.cat([each.flatten() for each in vectors]) for vectors in (found, expected))
        torch.testing.assert_close(found, expected, **CLOSE)


def block(n, comm):
    """The places of ``n`` that this rank has, as a slice."""
    mine = block_range(n, comm.size, comm.rank)
    return slice(mine.start, mine.stop)
