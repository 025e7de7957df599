"""Sparse Jacobians against dense ones."""

from __future__ import annotations

import pytest
import torch

from distconv.kernels.jacobian import Pattern, SparseJacobian, multiply
from tests.kernels.jacobian.references import assert_close, normal


def random_jacobian(rows, cols, batch=1, seed=0, kept=0.4):
    generator = torch.Generator().manual_seed(seed)
    places = (torch.rand(rows, cols, generator=generator) < kept).nonzero()
    places = places[torch.randperm(len(places), generator=generator)]
    pattern, order = Pattern.from_positions(places[:, 0], places[:, 1], (rows, cols))
    assert torch.equal(places[order], places[order][pattern.transposed[1].argsort()][pattern.transposed[1]])
    return SparseJacobian(pattern, normal(batch, pattern.nnz, seed=seed))


@pytest.mark.parametrize("batch", [1, 3])
def test_products_with_vectors_and_dense_matrices_are_those_of_the_dense_matrix(batch):
    sparse = random_jacobian(5, 7, batch)
    dense = sparse.to_dense()
    for samples in (1, 3) if batch == 1 else (3,):
        vector, matrix = normal(samples, 7, seed=1), normal(samples, 7, 2, seed=2)
        assert_close(sparse.apply(vector), (dense @ vector[:, :, None])[:, :, 0])
        assert_close(sparse.times_dense(matrix), dense @ matrix)
    assert_close(sparse.transposed.to_dense(), dense.transpose(1, 2))
    torch_csr = sparse.to_torch()
    assert torch_csr.layout == torch.sparse_csr
    assert_close(torch_csr.to_dense().view(dense.shape), dense)
    if batch == 1:
        again = SparseJacobian.from_torch(torch_csr)
        assert again.pattern is sparse.pattern
        assert_close(again.to_dense(), dense)
        assert_close(SparseJacobian.from_torch(torch_csr.clone()).to_dense(), dense)


def test_matrices_without_non_zeros_are_zero():
    empty, other = random_jacobian(5, 7, kept=0.0), random_jacobian(7, 6)
    assert multiply(empty, other).pattern.nnz == 0
    assert_close(empty.apply(normal(2, 7)), torch.zeros(2, 5, dtype=torch.float64))
