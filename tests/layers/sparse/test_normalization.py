"""Instance norm against torch's on the features of each sample, and over ranks against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.layers.sparse import Partition, SparseConv, SparseInstanceNorm, SparseTensor
from tests.distconv.layouts import grid_over
from tests.layers.sparse.clouds import normal, random_cloud, rng_of
from tests.layers.sparse.test_distributed import check_same_as_one_process, grids


@pytest.mark.parametrize("affine", [True, False])
def test_each_sample_is_normalized_as_by_torch(affine):
    x = random_cloud(rng_of("instance"), 2, 3, sites=40)
    layer = SparseInstanceNorm(3, eps=1e-3, affine=affine).double()
    for n, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(normal(3, seed=n))
    y = layer(x)
    expected = torch.zeros_like(y.features)
    for sample in x.coords[:, 0].unique():
        rows = (x.coords[:, 0] == sample).nonzero()[:, 0]
        one = F.instance_norm(x.features[rows].t()[None], weight=layer.weight, bias=layer.bias, eps=1e-3)
        expected = expected.index_copy(0, rows, one[0].t())
    wanted = [x.features, *layer.parameters()]
    direction = normal(*y.shape, seed=3)
    ours, theirs = (torch.autograd.grad(each, wanted, direction) for each in (y.features, expected))
    torch.testing.assert_close([y.features, *ours], [expected, *theirs], rtol=1e-10, atol=1e-10)
    assert len(list(layer.parameters())) == 2 * affine


def test_a_sample_with_one_site_gives_the_bias():
    layer = SparseInstanceNorm(2).double()
    nn.init.ones_(layer.bias)
    x = SparseTensor(torch.tensor([[1, 5]]), normal(1, 2).requires_grad_(), batch_size=3)
    y = layer(x).features
    assert y.tolist() == [[1, 1]]
    y.sum().backward()
    assert not x.features.grad.any()


def test_over_ranks_it_is_as_in_one_process(comm):
    torch.manual_seed(0)
    model = nn.Sequential(SparseConv(2, 3, 3), SparseInstanceNorm(3), SparseConv(3, 2, 3)).double()
    for grid in grids(comm, 3):
        check_same_as_one_process(grid, model, random_cloud(rng_of("instance"), 3, 2, sites=60))
    # Sites of two samples on the first rank, and none on the others.
    partition = Partition(grid_over(comm, h=comm.size), ((), (), tuple(range(5, 4 + comm.size)), ()))
    x = SparseTensor(torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1], [2, 0, 1, 1]]), normal(3, 2).requires_grad_())
    check_same_as_one_process(partition.grid, model, x, partition)
