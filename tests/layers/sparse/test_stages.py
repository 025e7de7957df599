"""Point clouds packed as rows of samples, and sparse networks as pipeline stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.layers.sparse import SparseGlobalPool, SparseTensor, coordinate_manager, tensor
from distconv.layers.sparse.stages import as_stages, packed, unpacked
from tests.layers.sparse.clouds import normal, random_cloud, rng_of
from tests.layers.sparse.test_distributed import sorted_by_site


@pytest.mark.parametrize("dimension", [1, 2, 3, 4])
@pytest.mark.parametrize("sites", [0, 1, 25])
def test_a_cloud_is_the_same_after_it_was_packed(dimension, sites):
    x = random_cloud(rng_of(dimension, sites), dimension, 3, sites=sites)
    rows = packed(x)
    assert rows.shape[0] == x.batch_size == 4
    back = unpacked(rows, dimension)
    assert back.batch_size == 4
    (coords, features), (found, ours) = sorted_by_site(x), sorted_by_site(back)
    assert torch.equal(found, coords)
    assert torch.equal(ours, features)


def test_some_of_the_rows_are_those_samples():
    x = random_cloud(rng_of("some"), 3, 2, sites=30)
    part = unpacked(packed(x)[2:], 3)
    mine = x.coords[:, 0] >= 2
    assert part.batch_size == 2
    assert sorted(part.coords.tolist()) == sorted((x.coords[mine] - torch.tensor([2, 0, 0, 0])).tolist())


def test_coordinates_that_a_dtype_does_not_hold_raise():
    x = SparseTensor(torch.tensor([[0, 1 << 25]]), torch.zeros(1, 1))
    with pytest.raises(dc.CoordinateError, match=r"coordinates up to 16777216 in torch\.float32"):
        packed(x)
    for other in (SparseTensor(torch.tensor([[0, 2]]), torch.zeros(1, 1), 2), x.with_spatial_shape(1 << 26)):
        with pytest.raises(dc.CoordinateError, match="stride 1 and no spatial shape"):
            packed(other)


class _Fork(nn.Module):
    def forward(self, x):
        return x, torch.relu(x), SparseGlobalPool()(x)


class _Join(nn.Module):
    def forward(self, x, y, pooled):
        return SparseGlobalPool()(x + y) * pooled


def test_several_values_cross_between_stages_and_sites_are_not_looked_at_again(monkeypatch):
    x = random_cloud(rng_of("several"), 3, 2, sites=40)
    expected = _Join()(*_Fork()(x))
    first, second = as_stages([_Fork(), _Join()])
    rows = packed(x)
    monkeypatch.setattr(tensor, "check_coordinates", None)
    monkeypatch.setattr(coordinate_manager, "sorting_order", None)
    values = first(rows)
    assert len(values) == 3 + 3 + 1
    torch.testing.assert_close(second(*values), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("borders", [None, (5, 8)])
def test_strides_and_borders_reach_the_next_stage(borders):
    class Enter(nn.Module):
        def forward(self, x):
            return SparseTensor(x.coords * torch.tensor([1, 1, 2]), x.features, (1, 2)).with_spatial_shape(borders)

    x = SparseTensor(torch.tensor([[0, 4, 7], [2, 0, 1]]), normal(2, 1))
    first, second = as_stages([Enter(), nn.Identity()], 2)
    ours = second(*first(packed(x)))
    assert torch.equal(ours[0], x.coords * torch.tensor([1, 1, 2]))
    assert ours[2].tolist() == [3, 1, 2, *(borders or ())]


def test_a_stage_may_begin_with_a_plain_tensor():
    x = normal(3, 2).double()
    linear = nn.Linear(2, 2).double()
    assert torch.equal(as_stages([nn.Identity(), linear])[1](x), linear(x))
