"""Keys of caches: layers on the sites of one sparse tensor, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distconv.layers import sparse
from distconv.layers.sparse import SparseConv, SparseMaxPool, SparseTensor
from tests.distconv.layouts import grid_over, normal


def sparse_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    options: list[dict[str, Any]] = [
        {},
        {"kernel_size": (3, 1)},
        {"dilation": 2},
        {"kernel_size": None, "offsets": [(0, 0), (0, 1)]},
        {"kernel_size": None, "offsets": [(0, 0), (1, 0)]},
        {"submanifold": False},
        {"submanifold": False, "dilation": 2},
        {"submanifold": False, "stride": 2},
        {"submanifold": False, "stride": 3},
        {"submanifold": False, "stride": 2, "transposed": True},
        {"padding": 0},
        {"stride": (1, 2)},
        {"dilation": (1, 2)},
        {"stride": 2, "all_windows": True},
        {"stride": (1, 2), "all_windows": True},
        {"stride": 2, "all_windows": True, "padding": 0},
        {"stride": 2, "all_windows": True, "transposed": True},
        {"stride": (1, 2), "all_windows": True, "transposed": True},
    ]
    layers = [
        SparseConv(**{"in_channels": 1, "out_channels": 1, "kernel_size": 3, "dimension": 2} | o) for o in options
    ]
    pools = [SparseMaxPool(2, dimension=2), SparseMaxPool(3, 2, 2), SparseMaxPool(3, 2, 2, all_windows=True)]
    return [*(each.double() for each in layers), *pools, layers[0].double()]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ranks_with_sites", ["all", "the first"])
def test_layers_on_the_sites_of_one_sparse_tensor(comm: Any, ranks_with_sites: str) -> None:
    places = [(0, h, w) for h in range(8) for w in range(9) if (h * w + h) % 3 != 1]
    coords, values = torch.tensor(places) * torch.tensor([1, 2, 2]), normal(len(places), 1)
    x, grid = SparseTensor(coords, values, 2), grid_over(comm, w=comm.size)
    alone = sparse.Partition(grid, ((), (), (100,) * (comm.size - 1)))
    partition = alone if ranks_with_sites == "the first" else None
    shared = sparse.scatter(x, grid, partition)
    for layer in sparse_layers():
        fresh = SparseTensor(coords, values, 2)
        found, expected = sparse.gather(layer(shared)), layer(fresh)
        order = expected.coords.tolist()
        rows = sorted(range(len(order)), key=order.__getitem__)
        taken = found.coords.tolist()
        where = sorted(range(len(taken)), key=taken.__getitem__)
        assert found.coords[where].tolist() == expected.coords[rows].tolist(), layer
        torch.testing.assert_close(found.features[where], expected.features[rows], rtol=1e-11, atol=1e-12)
