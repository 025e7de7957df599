"""Sparse networks over ranks against one process: results, gradients of features and parameters, running statistics."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.layers import sparse
from distconv.layers.sparse import Partition, SparseAvgPool, SparseConv, SparseGlobalPool, SparseMaxPool, SparseTensor
from tests.distconv.layouts import grid_over, raises_everywhere
from tests.layers.sparse.clouds import normal, random_cloud, random_coords, rng_of

AXES = {1: ("n", "w"), 2: ("n", "h", "w"), 3: ("n", "d", "h", "w"), 4: ("n", "d", "h", "w")}


def grids(comm, dimension):
    """Along one axis each, and over two where the ranks allow it."""
    axes = AXES[dimension]
    found = [{axis: comm.size} for axis in axes]
    if comm.size % 2 == 0 and comm.size > 2:
        found += [{axes[0]: 2, axes[1]: comm.size // 2}, {axes[-1]: 2, axes[-2]: comm.size // 2}]
    return [grid_over(comm, **each) for each in found]


def sorted_by_site(x):
    """Coordinates and features of a whole sparse tensor, by coordinates."""
    order = sorted(range(len(x.coords)), key=lambda row: x.coords[row].tolist())
    return x.coords[order], x.features[order]


def close(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{what}: {text}")


def check_same_as_one_process(grid, model, x, partition=None):
    """Compare results and all gradients of ``model`` on the cloud ``x``, split over ``grid`` and whole."""
    model, distributed_model = copy.deepcopy(model), copy.deepcopy(model)
    given, features = (x.features.detach().clone().requires_grad_() for _ in range(2))
    expected = model(x.replace(given))
    split = sparse.scatter(x.replace(features), grid, partition)
    found = distributed_model(split)
    if isinstance(expected, SparseTensor):
        assert isinstance(found.features, dc.DistTensor)
        (coords, theirs), (whole, ours) = sorted_by_site(expected), sorted_by_site(sparse.gather(found))
        assert torch.equal(whole, coords)
    else:
        theirs, ours = expected, dc.gather(found)
    close(ours, theirs, f"result on {grid}")
    direction = normal(*theirs.shape, seed=3)
    (theirs * direction).sum().backward()
    (ours * direction).sum().backward()
    close(features.grad, given.grad, f"gradient of the features on {grid}")
    for (name, parameter), other in zip(model.named_parameters(), distributed_model.parameters(), strict=True):
        close(other.grad, parameter.grad, f"gradient of {name} on {grid}")
    for (name, buffer), other in zip(model.named_buffers(), distributed_model.buffers(), strict=True):
        close(other, buffer, f"{name} on {grid}")


SITE_BY_SITE = {
    "linear": lambda: nn.Linear(3, 3),
    "linear without bias": lambda: nn.Linear(3, 3, bias=False),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "layer norm": lambda: nn.LayerNorm(3),
    "rms norm": lambda: nn.RMSNorm(3),
    "prelu": lambda: nn.PReLU(3),
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(1),
    "log softmax": lambda: nn.LogSoftmax(-1),
}


@pytest.mark.parametrize("name", SITE_BY_SITE)
def test_modules_that_work_site_by_site_leave_features_at_their_sites(comm, name):
    torch.manual_seed(0)
    model = nn.Sequential(SparseConv(2, 3, 3), SITE_BY_SITE[name](), SparseConv(3, 2, 3)).double()
    for grid in grids(comm, 3):
        check_same_as_one_process(grid, model, random_cloud(rng_of("by site"), 3, 2, sites=60))


def test_features_that_lie_otherwise_go_to_their_sites(comm):
    x = random_cloud(rng_of("otherwise"), 3, 2, sites=60)
    for grid in grids(comm, 3):
        split = sparse.scatter(x, grid)
        moved = split.features.redistribute(dc.Distribution(split.features.grid, ("n", None)))
        assert torch.equal(split.replace(moved).features.local, split.features.local)
        plain = dc.gather(moved)
        raises_everywhere(comm, dc.ShapeError, "must be a DistTensor, not a plain", partial(split.replace, plain))


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_ranks_without_sites_say_nothing_of_a_sample(comm, mode):
    """All features are negative: a zero for a sample that a rank has no site of would be the largest."""
    coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1], [2, 0, 3]])
    partition = Partition(grid_over(comm, h=comm.size), ((), tuple(range(5, 4 + comm.size)), ()))
    features = torch.tensor([[-3.0, -1.0], [-2.0, -5.0], [-4.0, -4.0], [-7.0, -8.0]], dtype=torch.float64)
    check_same_as_one_process(
        partition.grid, SparseGlobalPool(mode), SparseTensor(coords, features, batch_size=3), partition
    )
    found = SparseGlobalPool(mode)(
        sparse.scatter(SparseTensor(coords, features, batch_size=3), partition.grid, partition)
    )
    expected = {"max": [-2, -1, 0, 0, -7, -8], "avg": [-3, -10 / 3, 0, 0, -7, -8], "sum": [-9, -10, 0, 0, -7, -8]}
    torch.testing.assert_close(
        dc.gather(found).flatten(), torch.tensor(expected[mode], dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_what_goes_down_and_comes_back_up_has_the_finer_sites(comm):
    class Down(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = SparseConv(2, 3, 3)
            self.down = SparseConv(3, 4, 3, stride=2)
            self.norm = nn.BatchNorm1d(4)
            self.up = SparseConv(4, 3, 3, stride=2, transposed=True)
            self.leave = SparseConv(6, 2, 1)

        def forward(self, x):
            x = self.enter(x).relu() if hasattr(x, "relu") else F.relu(self.enter(x))
            y = self.up(F.relu(self.norm(self.down(x))))
            return self.leave(torch.cat([x, y], 1))

    for grid in grids(comm, 3):
        torch.manual_seed(1)
        check_same_as_one_process(grid, Down().double(), random_cloud(rng_of("down"), 3, 2, sites=60))


@pytest.mark.parametrize("borders", [None, (9, 8, 10)])
def test_sizes_by_dimension_and_all_windows(comm, borders):
    torch.manual_seed(2)
    windows = {"padding": (1, 0, 2), "all_windows": True}
    model = nn.Sequential(
        SparseConv(4, 4, (3, 1, 2), (2, 1, 3), groups=2, **windows),
        SparseMaxPool((1, 3, 2), (1, 2, 1), padding=(0, 1, 0)),
        SparseConv(4, 3, (1, 3, 2), (1, 2, 1), transposed=True),
        SparseConv(3, 2, (3, 1, 2), (2, 1, 3), transposed=True, padding=(1, 0, 2)),
        SparseAvgPool(2, 1, padding=1, all_windows=True),
    ).double()
    # Samples 1 and 3 have no sites.
    coords = random_coords(rng_of("by dimension"), 3, sites=50) + torch.tensor([0, 3, 3, 3])
    x = SparseTensor(coords, normal(len(coords), 4).requires_grad_(), batch_size=4).with_spatial_shape(borders)
    assert model(x).spatial_shape == (borders and (10, 9, 11))
    assert model[0](x).stride == (2, 1, 3)
    for grid in grids(comm, 3):
        check_same_as_one_process(grid, model, x)


@pytest.mark.ranks(at_least=2)
def test_sites_that_differ_on_one_rank_raise_on_all(comm):
    grid = grid_over(comm, w=comm.size)
    partition = Partition(grid, ((), tuple(range(1, comm.size))))
    x, y = (SparseTensor(torch.tensor([[0, 0], [0, last]]), normal(2, 1), batch_size=1) for last in (10, 11))
    x, y = (sparse.scatter(each, grid, partition) for each in (x, y))
    raises_everywhere(comm, dc.UnsupportedOperation, "different sites", lambda: x + y)
    raises_everywhere(
        comm,
        dc.CoordinateError,
        r"1 of 2 sites lie outside the spatial shape \(10,\)",
        partial(x.with_spatial_shape, 10),
    )


def test_ranks_without_sites_take_part(comm):
    coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1]])
    partition = Partition(grid_over(comm, h=comm.size), ((), tuple(range(5, 4 + comm.size)), ()))
    model = nn.Sequential(SparseConv(2, 3, 3, dimension=2), nn.BatchNorm1d(3), nn.ReLU(), SparseConv(3, 2, 3, 2, 2))
    x = SparseTensor(coords, normal(3, 2).requires_grad_(), batch_size=2)
    check_same_as_one_process(partition.grid, model.double(), x, partition)


def test_maps_and_halos_are_made_once(comm):
    x = sparse.scatter(random_cloud(rng_of("once"), 3, 2, sites=50), grid_over(comm, w=comm.size))
    model = nn.Sequential(SparseConv(2, 2, 3), SparseConv(2, 2, 3), SparseConv(2, 2, 3)).double()
    model(x)
    manager = x.coordinate_manager
    assert (manager.hits, manager.misses) == (2, 1)
    assert manager.bytes > 0 or not len(x.coords)


def test_a_rank_may_bring_its_own_sites(comm):
    coords = random_coords(rng_of("own"), 2, sites=30)
    partition = Partition.balanced(grid_over(comm, w=comm.size), coords)
    own_coords = coords[partition.owners(coords) == comm.rank]
    x = sparse.from_local(own_coords, own_coords[:, 1:].double(), partition, batch_size=3)
    assert x.features.shape == (len(coords), 2)
    assert torch.equal(sparse.gather(x).features, sparse.gather(x).coords[:, 1:].double())


@pytest.mark.ranks(at_least=2)
def test_sites_of_another_ranks_box_raise_on_all_ranks(comm):
    partition = Partition(grid_over(comm, w=comm.size), ((), tuple(range(1, comm.size))))
    coords = torch.tensor([[0, 0]]) + torch.tensor([0, int(comm.rank == 0)])
    coords[0, 1] = comm.rank + (comm.rank == 0)
    raises_everywhere(
        comm,
        dc.DistributionError,
        "1 sites of rank 0 are not in its box",
        lambda: sparse.from_local(coords, torch.zeros(1, 2), partition, batch_size=1),
    )


@pytest.mark.ranks(2)
def test_other_coordinates_are_noticed_whatever_their_sums(comm):
    rows = [[[0, 2], [0, 1]], [[0, 0], [0, 2]]][comm.rank]
    x = SparseTensor(torch.tensor(rows), normal(2, 1), batch_size=1)
    with pytest.raises(dc.MismatchError, match="sparse scatter: ranks disagree"):
        sparse.scatter(x, dc.ProcessGrid(comm, w=2))
