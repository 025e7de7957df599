"""Convolution over a kernel map: gradients, adjoint, dtypes. Against dense convolution: tests/layers/sparse."""

from __future__ import annotations

import pytest
import torch

from distconv.errors import UnsupportedOperation
from distconv.kernels.sparse import KernelMap, box_offsets, kernel_map, sparse_convolution
from tests.kernels.sparse.test_kernel_map import kernel_maps, random_sites, sorting_order


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_map(same):
    inputs = random_sites(1, 2)
    outputs = inputs if same else random_sites(2, 2, sites=20, reach=3)
    return kernel_map(inputs, outputs, box_offsets((3, 3), (1, 1)), 1, sorting_order(inputs))


@pytest.fixture(params=[kernel_maps.GROUP_PAIRS, 30], ids=["one group", "groups"])
def in_groups(request, monkeypatch):
    """All offsets of a map together, and some at a time."""
    monkeypatch.setattr(kernel_maps, "GROUP_PAIRS", request.param)


@pytest.mark.parametrize("same", [True, False])
def test_convolution_is_the_sum_over_pairs(in_groups, same):
    pairs = random_map(same)
    x, weight, bias = normal(pairs.in_sites, 3), normal(9, 3, 2, seed=1), normal(2, seed=2)
    expected = bias.repeat(pairs.out_sites, 1)
    for k, (inputs, outputs) in enumerate(pairs.pairs):
        for i, o in zip(inputs.tolist(), outputs.tolist(), strict=True):
            expected[o] += x[i] @ weight[k]
    torch.testing.assert_close(sparse_convolution(x, weight, pairs, bias), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("same", [True, False])
def test_gradcheck(in_groups, same):
    pairs = random_map(same)
    arguments = normal(pairs.in_sites, 2), normal(9, 2, 3, seed=1), normal(3, seed=2)
    arguments = [a.requires_grad_() for a in arguments]
    assert torch.autograd.gradcheck(lambda x, w, b: sparse_convolution(x, w, pairs, b), arguments)


@pytest.mark.parametrize("same", [True, False])
def test_the_transposed_map_gives_the_adjoint(same):
    """<A x, y> = <x, A^T y>, with the matrices of the offsets transposed too."""
    pairs = random_map(same)
    x, y, weight = normal(pairs.in_sites, 3), normal(pairs.out_sites, 2, seed=1), normal(9, 3, 2, seed=2)
    there = (sparse_convolution(x, weight, pairs) * y).sum()
    back = (sparse_convolution(y, weight.transpose(1, 2), pairs.transposed()) * x).sum()
    torch.testing.assert_close(there, back, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group_pairs", [kernel_maps.GROUP_PAIRS, 1])
def test_sums_of_half_precision_are_taken_in_float32(group_pairs, monkeypatch):
    """1 + 256 terms of 2^-8: in bfloat16 each of them would be lost, also where each is a group of its own."""
    monkeypatch.setattr(kernel_maps, "GROUP_PAIRS", group_pairs)
    one = torch.tensor([0])
    pairs = KernelMap(((one, one),) * 257, 1, 1)
    weight = torch.full((257, 1, 1), 2.0**-8, dtype=torch.bfloat16)
    weight[0] = 1
    assert sparse_convolution(torch.ones(1, 1, dtype=torch.bfloat16), weight, pairs).item() == 2


def test_features_that_need_no_gradient_get_none():
    pairs = random_map(True)
    x, weight = normal(pairs.in_sites, 2), normal(9, 2, 2).requires_grad_()
    sparse_convolution(x, weight, pairs).sum().backward()
    assert x.grad is None and weight.grad is not None


def test_double_backward_raises():
    pairs = random_map(True)
    x, weight = normal(pairs.in_sites, 2).requires_grad_(), normal(9, 2, 2)
    for result in (sparse_convolution(x, weight, pairs).square().sum(), sparse_convolution(x, weight, pairs).sum()):
        with pytest.raises(UnsupportedOperation, match=r"second derivative .* of a sparse convolution has no rule"):
            torch.autograd.grad(result, x, create_graph=True)


def test_the_gradient_of_any_offsets_is_that_of_their_pairs():
    line = torch.tensor([[0, n] for n in range(6)])
    pairs = kernel_map(line, line, ((1,), (0,), (1,)))
    arguments = [normal(6, 2).requires_grad_(), normal(3, 2, 2, seed=1).requires_grad_()]
    assert torch.autograd.gradcheck(lambda x, w: sparse_convolution(x, w, pairs), arguments)
