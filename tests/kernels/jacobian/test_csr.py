"""Sparse Jacobians and their products against dense ones."""

from __future__ import annotations

import pytest
import torch

from distconv.kernels.jacobian import Pattern, SparseJacobian, batched_tanh, multiply
from distconv.kernels.jacobian.csr import count_products, match_nonzeros
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


@pytest.mark.parametrize("batches", [(1, 1), (3, 1), (1, 3), (3, 3)])
def test_the_product_of_two_is_that_of_the_dense_matrices(batches):
    left, right = random_jacobian(5, 7, batches[0]), random_jacobian(7, 6, batches[1], seed=1)
    found = multiply(left, right)
    assert_close(found.to_dense(), left.to_dense() @ right.to_dense())
    expected = (left.to_dense()[0] != 0).to(torch.int64) @ (right.to_dense()[0] != 0).to(torch.int64)
    assert count_products(left.pattern, right.pattern) == int(expected.sum())
    assert found.pattern.nnz == int((expected > 0).sum())


def test_the_pairs_of_two_patterns_are_found_once(monkeypatch):
    left, right = random_jacobian(5, 7), random_jacobian(7, 6, seed=1)
    first = multiply(left, right)
    monkeypatch.setattr("distconv.kernels.jacobian.csr.match_nonzeros", None)
    again = multiply(SparseJacobian(left.pattern, 2 * left.values), right)
    assert again.pattern is first.pattern
    assert_close(again.values, 2 * first.values)


def test_a_diagonal_factor_takes_no_sums():
    left, diagonal = random_jacobian(5, 7), batched_tanh(normal(3, 7))
    found = match_nonzeros(left.pattern, diagonal.pattern)
    assert found.out is None
    assert_close(multiply(left, diagonal).to_dense(), left.to_dense() @ diagonal.to_dense())


def test_long_products_are_computed_in_pieces(monkeypatch):
    left, right = random_jacobian(5, 7, 3), random_jacobian(7, 6, seed=1)
    monkeypatch.setattr("distconv.kernels.jacobian.csr.MAX_PAIRS_AT_ONCE", 10)
    assert_close(multiply(left, right).to_dense(), left.to_dense() @ right.to_dense())
