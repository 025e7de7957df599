"""SparseTensor: its checks, its state and its arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import distconv as dc
from distconv.layers.sparse import SparseConv, SparseTensor
from tests.layers.sparse.clouds import normal, random_cloud, rng_of

ROWS = torch.tensor([[0, 4, 1], [2, 0, 0], [0, -4, 7]])


def test_it_has_what_it_was_given_in_the_order_given():
    features = normal(3, 5)
    x = SparseTensor(ROWS, features)
    assert x.features is features and torch.equal(x.coords, ROWS)
    assert (x.stride, x.dimension, x.batch_size, x.shape) == (1, 2, 3, (3, 5))
    assert x.dim() == x.features.dim()
    assert (x.dtype, x.device, x.requires_grad) == (torch.float64, torch.device("cpu"), False)
    assert repr(x) == (
        "SparseTensor(sites=3, channels=5, dimension=2, stride=1, batch_size=3, dtype=torch.float64, device=cpu)"
    )


def test_the_order_of_rows_changes_nothing_but_the_order_of_rows():
    x = random_cloud(rng_of("order"), 3, 2, sites=40)
    other = torch.randperm(len(x.coords), generator=torch.Generator().manual_seed(0))
    layer = SparseConv(2, 3, 3).double()
    permuted = layer(SparseTensor(x.coords[other], x.features[other]))
    torch.testing.assert_close(permuted.features, layer(x).features[other], rtol=1e-12, atol=1e-12)


def test_trailing_samples_without_sites_count_if_the_batch_size_says_so():
    assert SparseTensor(ROWS, normal(3, 1), batch_size=7).batch_size == 7
    assert SparseTensor(ROWS[:0], normal(0, 1)).batch_size == 0
    assert SparseTensor(ROWS[:0], normal(0, 1), batch_size=2).batch_size == 2


@pytest.mark.parametrize(
    ("coords", "features", "options", "error", "says"),
    [
        (ROWS.double(), normal(3, 1), {}, dc.CoordinateError, "not integers"),
        (ROWS / 0.0, normal(3, 1), {}, dc.CoordinateError, "3 of 3 coordinates are not a number"),
        (ROWS[[0, 1, 0]], normal(3, 1), {}, dc.CoordinateError, r"1 of 3 .* repeat .* first is \[0, 4, 1\]"),
        (
            ROWS - torch.tensor([1, 0, 0]),
            normal(3, 1),
            {},
            dc.CoordinateError,
            "2 of 3 .* negative batch index",
        ),
        (ROWS, normal(3, 1), {"batch_size": 2}, dc.CoordinateError, "beyond batch_size=2"),
        (ROWS, normal(3, 1), {"stride": 2}, dc.CoordinateError, "no multiples of the stride 2"),
        (ROWS, normal(3, 1), {"stride": 0}, dc.CoordinateError, "stride=0"),
        (ROWS, normal(3, 1), {"stride": (1, 1, 1)}, dc.CoordinateError, "one for each of 2 dimensions"),
        (ROWS, normal(3, 1), {"stride": (4, 2)}, dc.CoordinateError, r"2 of 3 .* multiples of the stride \(4, 2\)"),
        (ROWS * torch.tensor([1, 1 << 40, 1 << 40]), normal(3, 1), {}, dc.CoordinateError, "span 3 x"),
        (ROWS, normal(4, 1), {}, dc.ShapeError, r"shape \(4, 1\); 3 sites require \(3, channels\)"),
        (ROWS, normal(3), {}, dc.ShapeError, r"shape \(3,\); 3 sites"),
        (ROWS, normal(3, 1).to("meta"), {}, dc.ShapeError, "features are on meta and coordinates on cpu"),
    ],
)
def test_invalid_arguments_raise(coords, features, options, error, says):
    with pytest.raises(error, match=says):
        SparseTensor(coords, features, **options)


def test_replace_keeps_sites_and_checks_the_features():
    x = SparseTensor(ROWS, normal(3, 1))
    y = x.replace(normal(3, 4))
    assert y.sites is x.sites and y.coordinate_manager is x.coordinate_manager
    with pytest.raises(dc.ShapeError, match="3 sites require"):
        x.replace(normal(2, 4))


def test_a_stride_may_differ_by_dimension_and_a_space_may_have_borders():
    x = SparseTensor(torch.tensor([[0, 4, 3], [1, 0, 9]]), normal(2, 1), (2, 3))
    assert x.stride == (2, 3) and x.spatial_shape is None
    y = x.with_spatial_shape((3, 4))
    assert y.spatial_shape == (3, 4) and y.replace(y.features + 1).spatial_shape == (3, 4)
    assert SparseConv(1, 1, 3, dimension=2).double()(y).spatial_shape == (3, 4)
    assert y.to("meta").spatial_shape == (3, 4)
    assert y.with_spatial_shape(None).spatial_shape is None
    for shape, says in (((2, 4), "1 of 2 sites lie outside"), ((3, 3), "1 of 2"), ((0, 4), "positive"), ((3,), "each")):
        with pytest.raises(dc.CoordinateError, match=says):
            x.with_spatial_shape(shape)


def test_to_converts_the_features_and_moves_both():
    x = SparseTensor(ROWS, normal(3, 1))
    y = x.to(torch.float32)
    assert y.dtype == torch.float32 and y.sites is x.sites
    moved = x.to("meta")
    assert moved.features.device.type == moved.coords.device.type == "meta"
    assert moved.batch_size == 3


def test_detach_cuts_the_features():
    x = SparseTensor(ROWS, normal(3, 1).requires_grad_())
    assert x.requires_grad and not x.detach().requires_grad


def test_arithmetic_is_that_of_the_features():
    x, y = SparseTensor(ROWS, normal(3, 2)), normal(3, 2, seed=1)
    y = x.replace(y)
    a, b = x.features, y.features
    per_channel = torch.tensor([2.0, 3.0], dtype=torch.float64)
    for ours, theirs in [
        (x + y, a + b),
        (x - y, a - b),
        (x * y, a * b),
        (x / y, a / b),
        (2 + x, 2 + a),
        (2 - x, 2 - a),
        (2 * x, 2 * a),
        (2 / x, 2 / a),
        (-x, -a),
        (x * per_channel, a * per_channel),
        (per_channel - x, per_channel - a),
        (x + x.replace(a[:, :1]), a + a[:, :1]),
        (torch.add(x, y, alpha=3), torch.add(a, b, alpha=3)),
    ]:
        assert torch.equal(ours.features, theirs) and ours.sites is x.sites


@pytest.mark.parametrize("other", [ROWS[[1, 0, 2]], ROWS + 1])
def test_different_sites_may_not_meet(other):
    x, y = SparseTensor(ROWS, normal(3, 2)), SparseTensor(other, normal(3, 2))
    for function in (torch.add, torch.mul, lambda a, b: torch.cat([a, b], 1)):
        with pytest.raises(dc.UnsupportedOperation, match="different sites"):
            function(x, y)


def test_it_is_a_tree_of_coordinates_and_features():
    x = SparseTensor(ROWS * torch.tensor([1, 2, 6]), normal(3, 2), (2, 6), batch_size=5)
    leaves, spec = pytree.tree_flatten({"x": x})
    assert leaves[0] is x.coords and leaves[1] is x.features
    again = pytree.tree_unflatten(leaves, spec)["x"]
    assert again.sites is x.sites and again.coordinate_manager is x.coordinate_manager
    moved = leaves[0] + torch.tensor([0, 2, 6])
    received = pytree.tree_unflatten([moved, leaves[1]], spec)["x"]
    layer = SparseConv(2, 3, 3, dimension=2, stride=2).double()
    assert (received.stride, received.batch_size) == ((2, 6), 5)
    assert torch.equal(layer(received).features, layer(SparseTensor(moved, x.features, (2, 6))).features)
    assert pytree.tree_map(lambda leaf: None, x).features is None
