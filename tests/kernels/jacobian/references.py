"""Transposed Jacobians by autograd, one column at a time."""

from __future__ import annotations

import torch


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def jacobian_by_autograd(function, x):
    """(dy/dx)^T of a sample (C, H, W), dense, all flat."""

    def flat(v):
        return function(v.view(1, *x.shape)).flatten()

    return torch.autograd.functional.jacobian(flat, x.flatten()).t()


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
