"""Pooling over a kernel map and over samples, by a loop over sites."""

from __future__ import annotations

import pytest
import torch

from distconv.kernels.sparse import (
    global_max,
    global_sum,
    kernel_map,
    sparse_average_pool,
    sparse_max_pool,
    sparse_sum_pool,
)
from tests.kernels.sparse.test_convolution import in_groups, normal, random_map

__all__ = ["in_groups"]

WINDOWS = {
    sparse_max_pool: lambda rows: rows.amax(0),
    sparse_average_pool: lambda rows: rows.mean(0),
    sparse_sum_pool: lambda rows: rows.sum(0),
}
SAMPLES = {
    global_max: lambda rows: rows.amax(0),
    global_sum: lambda rows: rows.sum(0),
}


def by_windows(x, pairs, reduce):
    out = []
    for o in range(pairs.out_sites):
        inputs = torch.cat([rows_in[rows_out == o] for rows_in, rows_out in pairs.pairs])
        out.append(reduce(x[inputs]) if len(inputs) else x.new_zeros(x.shape[1]) * x.sum())
    return torch.stack(out)


def same(ours, theirs, x):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    direction = normal(*ours.shape, seed=7)
    a, b = (torch.autograd.grad(y, x, direction)[0] for y in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pool", WINDOWS)
@pytest.mark.parametrize("submanifold", [True, False])
def test_pooling_over_windows(in_groups, submanifold, pool):
    pairs = random_map(submanifold)
    x = normal(pairs.in_sites, 3).requires_grad_()
    same(pool(x, pairs), by_windows(x, pairs, WINDOWS[pool]), x)


def test_the_gradient_of_a_maximum_goes_to_the_first_of_equal_ones():
    sites = torch.tensor([[0, 0], [0, 1], [0, 2]])
    pairs = kernel_map(sites, sites[:1], ((0,), (1,), (2,)))
    x = torch.tensor([[1.0], [2.0], [2.0]], requires_grad=True)
    sparse_max_pool(x, pairs).sum().backward()
    assert x.grad.flatten().tolist() == [0, 1, 0]
    y = torch.tensor([[[1.0, 2.0, 2.0]]], requires_grad=True)
    torch.nn.functional.max_pool1d(y, 3).sum().backward()
    assert torch.equal(x.grad.flatten(), y.grad.flatten())


def test_a_nan_in_a_window_is_its_maximum():
    sites = torch.tensor([[0, 0], [0, 1], [0, 2]])
    x = torch.tensor([[1.0], [float("nan")], [2.0]])
    assert sparse_max_pool(x, kernel_map(sites, sites[:1], ((0,), (1,), (2,)))).isnan().all()


@pytest.mark.parametrize("pool", SAMPLES)
def test_pooling_over_samples_with_and_without_sites(pool):
    samples = torch.tensor([3, 0, 0, 3, 1, 0])
    x = normal(6, 4).requires_grad_()
    theirs = [SAMPLES[pool](x[samples == b]) if b in (0, 1, 3) else x.new_zeros(4) for b in range(5)]
    same(pool(x, samples, 5), torch.stack(theirs), x)


@pytest.mark.parametrize("pool", SAMPLES)
def test_pooling_over_samples_of_an_empty_cloud_gives_zeros(pool):
    x = torch.zeros(0, 4, requires_grad=True)
    y = pool(x, torch.zeros(0, dtype=torch.long), 2)
    assert torch.equal(y, torch.zeros(2, 4))
    y.sum().backward()


def test_the_gradient_of_a_global_maximum_goes_to_the_first_of_equal_ones_and_nans_win():
    x = torch.tensor([[1.0], [5.0], [5.0], [float("nan")], [2.0]], requires_grad=True)
    y = global_max(x, torch.tensor([0, 0, 0, 1, 1]), 2)
    assert y[0] == 5 and y[1].isnan()
    y.sum().backward()
    assert x.grad.flatten().tolist() == [0, 1, 0, 1, 0]
