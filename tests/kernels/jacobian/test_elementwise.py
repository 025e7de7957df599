"""Jacobians of ReLU, tanh and linear layers against autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from distconv.kernels.jacobian import batched_relu, batched_tanh, linear, relu, tanh
from tests.kernels.jacobian.references import assert_close, jacobian_by_autograd, normal


def test_a_relus_jacobian_is_autograds_and_stores_its_possible_zeros():
    x = normal(3, 4, 5)
    found = relu(x)
    assert found.layout == torch.sparse_csr and found.values().numel() == 60
    assert_close(found.to_dense(), jacobian_by_autograd(F.relu, x))
    assert_close(relu(F.relu(x)).to_dense(), found.to_dense())
    assert f"{1 - 1 / relu(torch.zeros(64, 32, 32)).shape[0]:.5f}" == "0.99998"


def test_a_tanhs_jacobian_is_autograds():
    x = normal(3, 4, 5)
    assert_close(tanh(x.tanh()).to_dense(), jacobian_by_autograd(torch.tanh, x))


def test_a_batch_has_values_of_each_sample_over_one_pattern():
    x = normal(2, 3, 4)
    for one, batched, y in ((relu, batched_relu, x), (tanh, batched_tanh, x.tanh())):
        found = batched(y)
        assert found.pattern.diagonal and found.shape == (2, 12, 12)
        assert_close(found.to_dense(), torch.stack([one(sample).to_dense() for sample in y]))
        assert batched(y).pattern is found.pattern


def test_a_linear_layers_jacobian_is_its_weight_transposed_without_zeros():
    weight = normal(3, 5)
    weight[weight.abs() < 0.5] = 0
    found = linear(weight)
    assert found.values().numel() == int((weight != 0).sum())
    assert_close(found.to_dense(), weight.t())
    assert torch.equal(linear(2 * weight).values(), 2 * found.values())
