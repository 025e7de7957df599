"""Boxes of sites: each site is in one box, intersecting ranks are found, and cuts balance the ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

import distconv as dc
from distconv.layers.sparse.partition import UNBOUNDED, Partition, grow_box, rows_in_box
from tests.distconv.layouts import grid_over
from tests.layers.sparse.clouds import random_coords, rng_of


def grids(comm):
    """Grids over samples and three dimensions of space."""
    shapes = [shape for shape in itertools.product(range(1, comm.size + 1), repeat=4) if _product(shape) == comm.size]
    return [grid_over(comm, **dict(zip("ndhw", shape, strict=True))) for shape in shapes[:6]]


def _product(shape):
    return shape[0] * shape[1] * shape[2] * shape[3]


def test_each_site_is_in_the_box_of_its_owner_alone(comm):
    coords = random_coords(rng_of(1), 3, samples=(0, 1, 2, 5), sites=80)
    for grid in grids(comm):
        partition = Partition.balanced(grid, coords)
        owners = partition.owners(coords)
        for rank in range(grid.size):
            assert torch.equal(rows_in_box(coords, partition.box(rank)), (owners == rank).nonzero().flatten())


def test_ranks_that_meet_a_box_are_those_whose_boxes_overlap_it(comm):
    coords = random_coords(rng_of(2), 3, sites=60)
    for grid in grids(comm):
        partition = Partition.balanced(grid, coords)
        for rank in range(grid.size):
            box = grow_box(partition.box(rank), (-2, 0, 1), (1, 3, 0))
            overlap = [
                other
                for other in range(grid.size)
                if other != rank
                and all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, partition.box(other), strict=True))
            ]
            assert partition.intersecting_ranks(box, rank) == overlap
            with pytest.warns(DeprecationWarning, match=r"Partition\.others is now Partition\.intersecting_ranks"):
                assert partition.others(box, rank) == overlap


@pytest.mark.ranks(4)
def test_cuts_follow_the_sites_and_not_the_extent(comm):
    rows = [(0, 100 + i % 4, i) for i in range(96)] + [(0, 0, i) for i in range(4)]
    coords = torch.tensor(rows)
    partition = Partition.balanced(grid_over(comm, h=2, w=2), coords)
    counts = torch.bincount(partition.owners(coords), minlength=4)
    assert counts.sum() == 100
    assert counts.max() <= 28
    assert partition.box(0)[1] == (-UNBOUNDED, partition.cuts[1][0])


def test_a_set_without_sites_has_a_partition(comm):
    partition = Partition.balanced(grid_over(comm, d=comm.size), torch.zeros(0, 4, dtype=torch.long))
    assert len(partition.owners(torch.tensor([[0, 1, 2, 3]]))) == 1


@pytest.mark.ranks(at_least=2)
def test_an_axis_that_cuts_nothing_raises(comm):
    with pytest.raises(dc.DistributionError, match=r"axis c splits none of them\. Use n, d, h, w"):
        Partition.balanced(grid_over(comm, c=comm.size), torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.ranks(2)
def test_cuts_that_do_not_fit_raise(comm):
    with pytest.raises(dc.DistributionError, match="2 parts require 1 ascending coordinates"):
        Partition(grid_over(comm, w=2), ((), (3, 4)))
