"""Halos of sites: needed sites and features are received, and gradients return to the owners."""

from __future__ import annotations

import pytest
import torch

from distconv.layers.sparse.partition import Partition, grow_box, rows_in_box
from distconv.layers.sparse.site_halo import RowExchange, SiteHalo, send_to_owners
from tests.distconv.layouts import grid_over
from tests.layers.sparse.clouds import normal, random_coords, rng_of

REACHES = [
    ((-1, -1), (1, 1)),
    ((2, 2), (2, 2)),
    ((0, -1), (0, -1)),
    ((0, -2), (3, 0)),
    ((0, 0), (0, 0)),
    ((-7, -7), (7, 7)),
]


def split(comm, coords, **axes):
    grid = grid_over(comm, **(axes or {"w": comm.size}))
    partition = Partition.balanced(grid, coords)
    return partition, coords[partition.owners(coords) == comm.rank]


@pytest.mark.parametrize(("low", "high"), REACHES)
@pytest.mark.parametrize("sites", [0, 3, 60])
def test_the_halo_is_what_others_have_in_the_grown_box(comm, low, high, sites):
    coords = random_coords(rng_of(sites), 2, sites=sites)
    partition, own_coords = split(comm, coords)
    halo = SiteHalo(partition, own_coords, low, high)
    wanted = coords[rows_in_box(coords, grow_box(partition.box(comm.rank), low, high))].tolist()
    own, ghosts = halo.coords[: len(own_coords)], halo.coords[len(own_coords) :]
    assert torch.equal(own, own_coords)
    inside = {tuple(row) for row in wanted} - {tuple(row) for row in own_coords.tolist()}
    assert sorted(map(tuple, ghosts.tolist())) == sorted(inside)


@pytest.mark.parametrize(("low", "high"), REACHES)
def test_features_come_with_their_sites_and_the_adjoint_takes_them_back(comm, low, high):
    coords = random_coords(rng_of(5), 2, samples=(0, 1), sites=50)
    features = normal(len(coords), 3, seed=1)
    partition, own_coords = split(comm, coords)
    rows = {tuple(row): n for n, row in enumerate(coords.tolist())}
    halo = SiteHalo(partition, own_coords, low, high)
    x = features[[rows[tuple(row)] for row in own_coords.tolist()]].reshape(-1, 3).requires_grad_()
    found = halo.send(x)
    expected = features[[rows[tuple(row)] for row in halo.coords.tolist()]].reshape(-1, 3)
    assert torch.equal(found, expected)
    y = normal(*found.shape, seed=10 + comm.rank)
    found.backward(y)
    forward = comm.allreduce(float((found.detach() * y).sum()))
    back = comm.allreduce(float((x.detach() * x.grad).sum()))
    assert forward == pytest.approx(back, rel=1e-12)


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_rows_go_to_their_owners_and_come_back(comm, rows):
    """All ranks but the first have rows; the last one owns none."""
    count = rows if comm.rank or comm.size == 1 else 0
    values = normal(count, 2, seed=comm.rank).requires_grad_()
    owners = (torch.arange(count) * 7 + comm.rank) % max(1, comm.size - 1)
    plan = RowExchange.to_owners(comm, owners)
    there = plan.send(torch.cat([values, owners[:, None].double()], 1))
    assert there[:, 2].tolist() == [comm.rank] * len(there)
    assert comm.allreduce(len(there)) == comm.allreduce(count)
    back = plan.send_back(there[:, :2] * (1 + comm.rank))
    assert torch.equal(back, values * (1 + owners)[:, None])
    y = normal(count, 2, seed=9 + comm.rank)
    back.backward(y)
    assert torch.equal(values.grad, y * (1 + owners)[:, None])


def test_sites_go_to_their_owners_once(comm):
    coords = random_coords(rng_of(6), 2, sites=60)
    partition, own_coords = split(comm, coords)
    steps = torch.tensor([[0, 0, 0], [0, 2, -1], [0, -1, 3]])
    made = (own_coords[:, None] + steps).reshape(-1, 3)
    found = send_to_owners(partition, made, (-1, -1), (2, 3))
    everywhere = (coords[:, None] + steps).reshape(-1, 3).unique(dim=0)
    assert torch.equal(found, everywhere[partition.owners(everywhere) == comm.rank])
