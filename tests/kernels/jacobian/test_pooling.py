"""Jacobians of pooling against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from distconv.errors import ShapeError
from distconv.kernels.jacobian import Windows, batched_avg_pool2d, batched_max_pool2d, max_pool2d
from tests.kernels.jacobian.references import assert_close, jacobian_by_autograd, normal

CASES = [
    (2, 2, 0, 1, False),
    (2, 2, 0, 1, True),
    (3, 2, 1, 1, False),
    (3, 2, 1, 1, True),
    (3, 3, 1, 2, True),
    (2, 1, 1, 2, False),
    ((1, 3), (2, 1), (0, 1), (1, 2), False),
]
"""Kernel, stride, padding, dilation and ceil_mode."""


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "ceil"), CASES)
def test_a_max_pools_jacobian_is_autograds(kernel, stride, padding, dilation, ceil):
    x, options = normal(2, 3, 7, 8), (kernel, stride, padding, dilation, ceil)
    _, indices = F.max_pool2d(x, *options, return_indices=True)
    windows = Windows.build((7, 8), kernel, stride, padding, dilation, ceil=ceil)
    whole = batched_max_pool2d(indices, windows, x.dtype)
    for sample, matrix in enumerate(whole.to_dense()):
        expected = jacobian_by_autograd(lambda v: F.max_pool2d(v, *options), x[sample])
        assert_close(matrix, expected)
        one = max_pool2d(indices[sample], (3, 7, 8), x.dtype)
        assert one.layout == torch.sparse_csr and one.values().numel() == indices[sample].numel()
        assert_close(one.to_dense(), expected)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), ((2, 3), (1, 2), (1, 1))])
def test_an_average_pools_jacobian_is_autograds(kernel, stride, padding):
    found = batched_avg_pool2d(3, Windows.build((7, 8), kernel, stride, padding, 1), torch.float64)
    assert_close(
        found.to_dense()[0], jacobian_by_autograd(lambda v: F.avg_pool2d(v, kernel, stride, padding), normal(3, 7, 8))
    )


def test_guaranteed_zeros_are_those_of_the_papers_table():
    _, indices = F.max_pool2d(torch.rand(1, 64, 32, 32), 2, return_indices=True)
    pattern = batched_max_pool2d(indices, Windows.build((32, 32), 2, 2, 0, 1)).pattern
    assert pattern.shape == (65536, 16384) and pattern.nnz == 65536
    assert f"{pattern.sparsity:.5f}" == "0.99994"


def test_samples_share_a_pattern_that_is_made_once():
    windows = Windows.build((6, 6), 2, 2, 0, 1)
    first, second = (
        batched_max_pool2d(F.max_pool2d(normal(2, 3, 6, 6, seed=seed), 2, return_indices=True)[1], windows)
        for seed in (1, 2)
    )
    assert first.pattern is second.pattern


def test_shapes_that_do_not_fit_are_refused():
    indices = torch.zeros(2, 3, 4, 4, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"indices \(2, 3, 4, 4\) are not \(C, H_out, W_out\) of one sample"):
        max_pool2d(indices, (3, 8, 8))
    with pytest.raises(ShapeError, match=r"H_out and W_out \(3, 3\)"):
        batched_max_pool2d(indices, Windows.build((6, 6), 2, 2, 0, 1))
