"""Moments that keep their digits, and batch norm's gradient in two halves, against torch's autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from distconv.kernels import normalization
from distconv.kernels.normalization import (
    BatchNormGradient,
    copy_if_misread,
    gradient_sums,
    input_gradient,
    refine_moments,
)

EPS = 1e-3


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def moments(x):
    dims = [d for d in range(x.dim()) if d != 1]
    return x.mean(dims), x.var(dims, correction=0)


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 6), (2, 3, 5, 4), (2, 3, 2, 3, 4), (2, 3, 1, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_from_the_sums_of_blocks_is_that_of_the_whole(shape, weighted):
    x, grad = normal(*shape).requires_grad_(), normal(*shape, seed=1)
    w = normal(3, seed=2).requires_grad_() if weighted else None
    b = normal(3, seed=3).requires_grad_() if weighted else None
    F.batch_norm(x, None, None, w, b, True, eps=EPS).backward(grad)
    whole = x.detach()
    statistics = moments(whole)
    halves = [
        BatchNormGradient(dy, block, None if w is None else w.detach(), statistics, EPS)
        for dy, block in ((grad[:1], whole[:1]), (grad[1:], whole[1:]), (grad[:0], whole[:0]))
    ]
    total = sum(half.sums for half in halves)
    for half in halves:
        half.sums = total
    close(torch.cat([half.input_gradient(whole.numel() // 3) for half in halves]), x.grad)
    if weighted:
        close(total, torch.stack([w.grad, b.grad]))


@pytest.mark.parametrize("elements", [1, 7, 30, 64, 1000])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_gradients_do_not_depend_on_the_size_of_slices(monkeypatch, elements, order):
    monkeypatch.setattr(normalization, "_BLOCK_ELEMENTS", elements)
    x = normal(2, 7, 3, 5).contiguous(memory_format=order).requires_grad_()
    grad = normal(2, 7, 3, 5, seed=1).contiguous(memory_format=order)
    w, b = (normal(7, seed=seed).requires_grad_() for seed in (2, 3))
    F.batch_norm(x, None, None, w, b, True, eps=EPS).backward(grad)
    half = BatchNormGradient(grad, x.detach(), w.detach(), moments(x.detach()), EPS)
    close(half.sums, torch.stack([w.grad, b.grad]))
    close(half.input_gradient(x.numel() // 7), x.grad)


def test_with_given_moments_the_gradient_is_that_of_evaluation():
    x, grad = normal(2, 3, 5, 4).requires_grad_(), normal(2, 3, 5, 4, seed=1)
    w, b = normal(3, seed=2).requires_grad_(), normal(3, seed=3).requires_grad_()
    given = normal(3, seed=4), normal(3, seed=5).abs()
    F.batch_norm(x, *given, w, b, False, eps=EPS).backward(grad)
    inverse = (given[1] + EPS).rsqrt()
    constant = given[0], torch.zeros(3), torch.zeros(3)
    close(input_gradient(grad, x.detach(), w.detach() * inverse, constant), x.grad)
    close(gradient_sums(grad, x.detach(), given, inverse, EPS), torch.stack([w.grad, b.grad]))


def test_far_from_the_origin_moments_keep_their_digits():
    x = 1e8 + normal(1000)

    def about(origin):
        offset = x - origin
        mean = offset.mean()
        return origin + mean, (offset * offset).mean() - mean * mean

    origin = torch.zeros((), dtype=torch.float64)
    mean, var = refine_moments(about, origin, torch.float64)
    expected, offset = torch.var_mean(x - 1e8, correction=0)  # a difference without rounding
    torch.testing.assert_close((var, mean), (expected, 1e8 + offset), rtol=1e-12, atol=0)
    assert not torch.isclose(about(origin)[1], expected, rtol=1e-3)


def test_one_channel_far_from_its_origin_is_enough_to_take_all_moments_again():
    x = torch.stack([normal(1000), 1e8 + normal(1000, seed=1)])

    def about(origin):
        offset = x - origin[:, None]
        mean = offset.mean(1)
        return origin + mean, (offset * offset).mean(1) - mean * mean

    _, var = refine_moments(about, torch.zeros(2, dtype=torch.float64), torch.float64)
    expected = torch.var(x - torch.tensor([[0.0], [1e8]], dtype=torch.float64), 1, correction=0)
    torch.testing.assert_close(var, expected, rtol=1e-12, atol=0)


@pytest.mark.cpu
def test_in_half_precision_the_gradient_is_rounded_once():
    x, grad = (normal(8, 3, 5, 4, seed=seed).bfloat16() for seed in (0, 1))
    x[:, 1] *= 1e-3  # a small variance, by which much is divided
    w = normal(3, seed=2).float()
    mean, var = moments(x.double())
    wide = x.double().requires_grad_()
    F.batch_norm(wide, None, None, w.double(), None, True, eps=EPS).backward(grad.double())
    gradient = BatchNormGradient(grad, x, w, (mean.float(), var.float()), EPS)
    found = gradient.input_gradient(x.numel() // 3)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits, and what float32 adds up to.
    allowed = wide.grad.abs() * 2.0**-8 * 1.01 + 1e-6 * wide.grad.abs().max()
    assert ((found.double() - wide.grad).abs() <= allowed).all()


def test_one_sample_whose_stride_is_not_that_of_its_elements_is_copied():
    one = torch.arange(24.0).as_strided((1, 2, 3, 2), (17, 1, 4, 2))
    assert copy_if_misread(one).stride() == (12, 6, 2, 1)
    two = torch.arange(24.0).view(2, 2, 3, 2)
    assert copy_if_misread(two) is two
