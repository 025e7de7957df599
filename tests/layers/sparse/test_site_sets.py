"""Pruning, unions and broadcasts against volumes, and over ranks against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.layers import sparse
from distconv.layers.sparse import (
    SparseConv,
    SparseGlobalPool,
    SparseTensor,
    broadcast_to_sites,
    prune,
    to_dense,
    union,
)
from tests.distconv.layouts import grid_over, raises_everywhere
from tests.layers.sparse.clouds import normal, random_cloud, random_coords, rng_of
from tests.layers.sparse.test_distributed import check_same_as_one_process, grids

SHAPE, ORIGIN = (16, 16), (-8, -8)


def volume(x):
    return to_dense(x, SHAPE, origin=ORIGIN)


def same_gradients(found, expected, wanted):
    direction = normal(*expected.shape, seed=9)
    ours, theirs = (torch.autograd.grad(y, wanted, direction) for y in (found, expected))
    torch.testing.assert_close([found, *ours], [expected, *theirs], rtol=1e-12, atol=1e-12)


def test_pruning_keeps_the_sites_of_the_mask():
    x = random_cloud(rng_of("prune"), 2, 3, sites=40, stride=2)
    keep = x.features.detach()[:, 0] > 0
    y = prune(x, keep)
    assert torch.equal(y.coords, x.coords[keep]) and y.stride == 2
    dense_keep = volume(x.replace(x.features.detach()[:, :1])) > 0
    same_gradients(volume(y), volume(x) * dense_keep, [x.features])


def test_a_pruned_tensor_returns_to_the_same_finer_sites():
    x = random_cloud(rng_of("prune"), 2, 3, sites=40)
    coarse = SparseConv(3, 2, 2, 2, 2).double()(x)
    pruned = prune(coarse, coarse.features[:, 0] > 0)
    assert 0 < len(pruned.coords) < len(coarse.coords)
    up = SparseConv(2, 3, 2, 2, 2, transposed=True, bias=False).double()
    out = up(pruned)
    assert out.sites is x.sites
    zeros = coarse.replace(coarse.features * (coarse.features[:, :1] > 0))
    torch.testing.assert_close(out.features, up(zeros).features, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep", [torch.ones(3), torch.ones(4, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool)])
def test_a_mask_that_does_not_fit_raises(keep):
    x = SparseTensor(torch.tensor([[0, 1], [0, 2], [0, 5]]), normal(3, 2))
    with pytest.raises(dc.ShapeError, match=r"prune: keep is .*\. Pass booleans \(3,\)"):
        prune(x, keep)


def test_a_union_is_the_sum_of_the_volumes():
    rng = rng_of("union")
    clouds = [random_cloud(rng, 2, 3, sites=n, stride=2) for n in (30, 0, 20)]
    found = union(*clouds)
    assert found.coords.tolist() == torch.cat([x.coords for x in clouds]).unique(dim=0).tolist()
    same_gradients(volume(found), sum(volume(x) for x in clouds), [x.features for x in clouds])


def test_a_union_of_equal_sites_is_the_sum():
    x = random_cloud(rng_of("equal"), 3, 2, sites=30)
    y = x.replace(normal(*x.shape, seed=4))
    found = union(x, y)
    order = x.sites.order
    assert torch.equal(found.coords, x.coords[order]) and torch.equal(found.features, (x.features + y.features)[order])


def test_tensors_of_different_kinds_have_no_union():
    x = SparseTensor(torch.tensor([[0, 4, 2]]), normal(1, 2))
    others = [
        SparseTensor(x.coords, normal(1, 3)),
        SparseTensor(x.coords, normal(1, 2), (1, 2)),
        SparseTensor(x.coords, normal(1, 2), batch_size=2),
        SparseTensor(x.coords[:, :2], normal(1, 2)),
        x.with_spatial_shape(9),
    ]
    for other in others:
        with pytest.raises(dc.ShapeError, match="union: sparse tensors of one kind are required, not 2"):
            union(x, other)
    with pytest.raises(dc.ShapeError, match="not 0"):
        union()
    with pytest.raises(dc.UnsupportedOperation, match="requires a SparseTensor"):
        union(x, x.features)
    with pytest.raises(dc.UnsupportedOperation, match=r"sum them with sparse\.union"):
        x + SparseTensor(x.coords + 1, normal(1, 2))


def test_values_of_samples_are_at_all_of_their_sites():
    x = random_cloud(rng_of("broadcast"), 2, 3, sites=40)
    values = normal(4, 2, seed=5).requires_grad_()
    y = broadcast_to_sites(values, x)
    assert y.sites is x.sites
    active = volume(x.replace(torch.ones_like(x.features[:, :1])))
    same_gradients(volume(y), values[:, :, None, None] * active, [values])
    for shape in ((3, 2), (4,)):
        with pytest.raises(dc.ShapeError, match=r"Pass \(4, channels\)"):
            broadcast_to_sites(values.new_zeros(shape), x)


# -- over ranks -------------------------------------------------------------------------------------------------------


class Combined(nn.Module):
    """Pruning, union and broadcasts, with sites of which some ranks have none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.widen = SparseConv(2, 2, 3, submanifold=False)
        self.scale = nn.Parameter(normal(4, 2, seed=2))

    def forward(self, x):
        wide = self.widen(x)
        positive = prune(wide, wide.features[:, 0] > 0.4)
        y = union(x, positive, prune(x, x.features[:, 1] > 0))
        pooled = SparseGlobalPool("max")(y)
        y = y * broadcast_to_sites(pooled, y) + broadcast_to_sites(self.scale, y)
        return torch.cat([y, broadcast_to_sites(pooled * self.scale, y)], 1)


def test_over_ranks_they_are_as_in_one_process(comm):
    for grid in grids(comm, 3):
        check_same_as_one_process(grid, Combined().double(), random_cloud(rng_of("combined"), 3, 2, sites=50))


def test_ranks_may_have_no_site_before_and_after(comm):
    coords = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [2, 0, 1, 1]])
    partition = sparse.Partition(grid_over(comm, h=comm.size), ((), (), tuple(range(1, comm.size)), ()))
    x = SparseTensor(coords, normal(3, 2, seed=6).requires_grad_(), batch_size=4)
    check_same_as_one_process(partition.grid, Combined().double(), x, partition)
    split = sparse.scatter(x, partition.grid, partition)
    nothing = prune(split, split.features[:, 0] > 100)
    assert nothing.shape == (0, 2)
    assert sorted(sparse.gather(union(nothing, split)).coords.tolist()) == coords.tolist()


@pytest.mark.ranks(at_least=2)
def test_other_partitions_have_no_union(comm):
    grid = grid_over(comm, w=comm.size)
    coords = random_coords(rng_of("parts"), 1, sites=20)
    x = SparseTensor(coords, normal(len(coords), 1), batch_size=3)
    parts = [sparse.Partition(grid, ((), tuple(range(first, first + comm.size - 1)))) for first in (0, 1)]
    first, second = (sparse.scatter(x, grid, partition) for partition in parts)
    raises_everywhere(comm, dc.DistributionError, "split by different partitions", partial(union, first, second))
    raises_everywhere(comm, dc.DistributionError, "split by different partitions", partial(union, x, second))
    plain = torch.ones(len(x.coords), dtype=torch.bool)
    raises_everywhere(comm, dc.ShapeError, "must be a DistTensor", partial(prune, first, plain))
