"""Products of sparse Jacobians against dense ones."""

from __future__ import annotations

import pytest
import torch

from distconv.kernels.jacobian import SparseJacobian, batched_tanh, multiply
from distconv.kernels.jacobian.product import count_products, match_nonzeros
from tests.kernels.jacobian.references import assert_close, normal
from tests.kernels.jacobian.test_csr import random_jacobian


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
    monkeypatch.setattr("distconv.kernels.jacobian.product.match_nonzeros", None)
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
