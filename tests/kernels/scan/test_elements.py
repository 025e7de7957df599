"""Elements of a scan: their products against dense ones, for each kind of matrix."""

from __future__ import annotations

import itertools

import pytest
import torch

from distconv.kernels.jacobian import SparseJacobian
from distconv.kernels.scan.elements import Affine, Chain, Identity, Stack, matrix_matrix, matrix_vector
from tests.kernels.scan.chains import CLOSE, assert_close, csr, dense_of, normal, stack

SAMPLES = 3


def matrices(rows, cols):
    dense = normal(SAMPLES, rows, cols, seed=rows)
    dense[:, 0, 1] = 0
    return [dense, dense[:1], csr(dense[0]), csr(dense[0], SAMPLES)]


@pytest.mark.parametrize("kinds", list(itertools.product(range(4), range(4))))
def test_a_product_of_any_two_kinds_is_that_of_dense_matrices(kinds):
    second, first = matrices(4, 5)[kinds[0]], matrices(5, 6)[kinds[1]]
    found = matrix_matrix(second, first)
    assert isinstance(found, SparseJacobian) == (min(kinds) >= 2)
    torch.testing.assert_close(dense_of(found), dense_of(second) @ dense_of(first), **CLOSE)


@pytest.mark.parametrize("kind", range(4))
def test_a_product_with_the_identity_is_the_other_matrix_itself(kind):
    matrix = matrices(4, 5)[kind]
    assert matrix_matrix(matrix, Identity()) is matrix and matrix_matrix(Identity(), matrix) is matrix
    vector = normal(SAMPLES, 5)
    assert matrix_vector(Identity(), vector) is vector
    torch.testing.assert_close(matrix_vector(matrix, vector), (dense_of(matrix) @ vector[..., None])[..., 0], **CLOSE)


@pytest.mark.parametrize("shifts", list(itertools.product([False, True], [False, True])))
def test_affine_maps_are_composed_in_order(shifts):
    first, second = (
        Affine(normal(SAMPLES, 4, 4, seed=i), normal(SAMPLES, 4, seed=i + 5) if shifts[i] else None) for i in (0, 1)
    )
    vector = normal(SAMPLES, 4, seed=9)
    torch.testing.assert_close(second.compose_after(first)(vector), second(first(vector)), **CLOSE)


@pytest.mark.parametrize("m", range(6))
@pytest.mark.parametrize("samples", [1, SAMPLES])
def test_a_stack_and_a_list_of_the_same_elements_agree(m, samples):
    matrices, shifts, vector = stack(m, samples), normal(m, SAMPLES, 4, seed=2), normal(SAMPLES, 4, seed=3)
    above = normal(m // 2, SAMPLES, 4, seed=4)
    stacked = Stack(matrices, shifts)
    listed = Chain([Affine(matrix, shift) for matrix, shift in zip(matrices, shifts, strict=True)])
    assert_close(stacked.apply_in_order(vector), listed.apply_in_order(vector))
    assert_close(stacked.down_sweep(vector, above), listed.down_sweep(vector, list(above)))
    assert_close(stacked.combine_pairs().apply_in_order(vector), listed.combine_pairs().apply_in_order(vector))
    assert_close(stacked[1:].apply_in_order(vector), listed[1:].apply_in_order(vector))
