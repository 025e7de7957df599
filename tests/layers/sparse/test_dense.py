"""Volumes from sparse tensors and back."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.layers.sparse import SparseTensor, from_dense, to_dense
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


def test_the_volume_ends_behind_the_last_site():
    x = SparseTensor(torch.tensor([[0, 4, 0], [1, 2, 6]]), torch.tensor([[1.0], [2.0]]), 2)
    assert to_dense(x).shape == (2, 1, 3, 4)
    assert to_dense(x)[1, 0, 1, 3] == 2


def test_sites_are_active_where_told_also_with_zero_features():
    active = torch.tensor([[True, False, True]])
    x = from_dense(torch.tensor([[[0.0, 1.0, 2.0]]]), active=active)
    assert x.coords.tolist() == [[0, 0], [0, 2]] and x.features.tolist() == [[0], [2]]


def test_an_empty_cloud_has_an_empty_volume():
    x = SparseTensor(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 5), batch_size=2)
    assert to_dense(x).shape == (2, 5, 0, 0)
    assert not to_dense(x, (2, 3)).any()
    assert from_dense(torch.zeros(2, 5, 4)).shape == (0, 5)


def test_sites_outside_are_refused():
    x = SparseTensor(torch.tensor([[0, 4, 0], [1, -1, 6]]), normal(2, 1))
    with pytest.raises(dc.CoordinateError, match=r"1 of 2 sites lie outside .* first is \[1, -1, 6\]"):
        to_dense(x)
    with pytest.raises(dc.CoordinateError, match=r"2 of 2 sites lie outside the volume of \(3, 3\) cells"):
        to_dense(x, (3, 3))


def test_shapes_that_do_not_fit_are_refused():
    x = SparseTensor(torch.tensor([[0, 4, 0]]), normal(1, 1))
    with pytest.raises(dc.ShapeError, match=r"size \(3,\)"):
        to_dense(x, (3,))
    with pytest.raises(dc.ShapeError, match=r"active has shape \(2, 3\)"):
        from_dense(normal(2, 1, 4), active=torch.ones(2, 3, dtype=torch.bool))
