"""Volumes from sparse tensors and back."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.layers import sparse
from distconv.layers.sparse import SparseTensor, from_dense, to_dense
from tests.distconv.layouts import raises_everywhere
from tests.layers.sparse.clouds import normal, random_cloud, rng_of


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dimension", [1, 2, 3, 4])
def test_there_and_back_gives_the_same_features_at_the_same_sites(dimension, stride):
    x = random_cloud(rng_of("round trip", dimension), dimension, 3, stride=stride)
    dense = to_dense(x, [9] * dimension, origin=[-4 * stride] * dimension)
    assert dense.shape == (4, 3, *[9] * dimension)
    assert (dense != 0).any(1).sum() == len(x.coords)
    back = from_dense(dense, stride=stride)
    shifted = x.coords + torch.tensor([0, *[4 * stride] * dimension])
    order = [back.coords.tolist().index(row) for row in shifted.tolist()]
    assert torch.equal(back.features[order], x.features) and (back.stride, back.batch_size) == (stride, 4)
    assert torch.equal(torch.autograd.grad(dense, x.features, torch.ones_like(dense))[0], torch.ones_like(x.features))


def test_the_volume_ends_after_the_last_site():
    x = SparseTensor(torch.tensor([[0, 4, 0], [1, 2, 6]]), torch.tensor([[1.0], [2.0]]), 2)
    assert to_dense(x).shape == (2, 1, 3, 4)
    assert to_dense(x)[1, 0, 1, 3] == 2


def test_sites_are_active_where_requested_also_with_zero_features():
    active = torch.tensor([[True, False, True]])
    x = from_dense(torch.tensor([[[0.0, 1.0, 2.0]]]), active=active)
    assert x.coords.tolist() == [[0, 0], [0, 2]] and x.features.tolist() == [[0], [2]]


def test_an_empty_cloud_has_an_empty_volume():
    x = SparseTensor(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 5), batch_size=2)
    assert to_dense(x).shape == (2, 5, 0, 0)
    assert not to_dense(x, (2, 3)).any()
    assert from_dense(torch.zeros(2, 5, 4)).shape == (0, 5)


def test_sites_outside_raise():
    x = SparseTensor(torch.tensor([[0, 4, 0], [1, -1, 6]]), normal(2, 1))
    with pytest.raises(dc.CoordinateError, match=r"1 of 2 sites lie outside .* first is \[1, -1, 6\]"):
        to_dense(x)
    with pytest.raises(dc.CoordinateError, match=r"2 of 2 sites lie outside the volume of \(3, 3\) cells"):
        to_dense(x, (3, 3))


def test_shapes_that_do_not_fit_raise():
    x = SparseTensor(torch.tensor([[0, 4, 0]]), normal(1, 1))
    with pytest.raises(dc.ShapeError, match=r"size \(3,\)"):
        to_dense(x, (3,))
    with pytest.raises(dc.ShapeError, match=r"active has shape \(2, 3\)"):
        from_dense(normal(2, 1, 4), active=torch.ones(2, 3, dtype=torch.bool))


# -- split over ranks -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dimension", [1, 2, 3])
@pytest.mark.parametrize(("stride", "origin"), [(1, -4), (2, -8), (2, -9)])
def test_the_volume_of_a_split_tensor_is_that_of_one_process(comm, dimension, stride, origin):
    cloud = random_cloud(rng_of("split volume", dimension), dimension, 3, stride=stride)
    weights = normal(4, 3, *[13] * dimension, seed=5)
    for axis in ("n", "w"):
        grid = dc.ProcessGrid(comm, **{axis: comm.size})
        features = cloud.features.detach().clone().requires_grad_()
        plain = SparseTensor(cloud.coords, features, stride, batch_size=4)
        expected = to_dense(plain, [13] * dimension, origin=[origin] * dimension)
        (theirs,) = torch.autograd.grad((expected * weights).sum(), features)
        found = to_dense(sparse.scatter(plain, grid), [13] * dimension, origin=[origin] * dimension)
        assert isinstance(found, dc.DistTensor) and torch.equal(found.gather(), expected)
        (ours,) = torch.autograd.grad((found * weights).sum(), features)
        assert torch.equal(ours, theirs)
        smallest = to_dense(sparse.scatter(plain, grid), origin=[-8] * dimension)
        assert torch.equal(smallest.gather(), to_dense(plain, origin=[-8] * dimension))
        grid.free()


@pytest.mark.ranks(2, 3)
def test_sites_of_a_split_tensor_outside_raise_on_all_ranks(comm):
    grid = dc.ProcessGrid(comm, w=comm.size)
    x = sparse.scatter(SparseTensor(torch.tensor([[0, 4, 0], [1, 2, 6]]), normal(2, 1)), grid)
    raises_everywhere(comm, dc.CoordinateError, "1 of 2 sites lie outside", lambda: to_dense(x, (5, 3)))
    grid.free()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("axis", ["n", "h", "w"])
def test_sites_of_a_distributed_volume_are_those_of_one_process(comm, axis):
    grid = dc.ProcessGrid(comm, **{axis: comm.size})
    volume = normal(3, 2, 7, 9) * (torch.rand(3, 1, 7, 9, generator=torch.Generator().manual_seed(1)) < 0.4)
    given = [volume.clone().requires_grad_() for _ in range(2)]
    expected, found = from_dense(given[0], stride=2), from_dense(dc.scatter(given[1], grid), stride=2)
    whole = sparse.gather(found)
    assert torch.equal(whole.coords, expected.coords) and torch.equal(whole.features, expected.features)
    weights = normal(*expected.shape, seed=7)
    (expected.features * weights).sum().backward()
    (whole.features * weights).sum().backward()
    assert torch.equal(given[1].grad, given[0].grad)
    grid.free()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("axis", ["n", "w"])
def test_coordinates_of_a_split_tensor_index_what_is_pooled_as_in_one_process(comm, axis):
    """Broadcast the features of a sample to its sites, as users of MinkowskiEngine write it."""
    grid = dc.ProcessGrid(comm, **{axis: comm.size})
    cloud = random_cloud(rng_of("pooled"), 2, 3)
    found = []
    for split in (False, True):
        features = cloud.features.detach().clone().requires_grad_()
        x = SparseTensor(cloud.coords, features, batch_size=4)
        x = sparse.scatter(x, grid) if split else x
        pooled = sparse.SparseGlobalPool()(x)
        y = x.replace(x.features + pooled[x.coords[:, 0]] * x.coords[:, 1:].sum(1, keepdim=True))
        assert x.coords.shape == (len(cloud.coords), 3)
        y.features.square().sum().backward()
        whole = sparse.gather(y)
        order = sorted(range(len(whole.coords)), key=lambda row: whole.coords[row].tolist())
        found.append((whole.features[order], features.grad))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    grid.free()
