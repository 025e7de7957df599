"""Edges of blocks and indices owned by a rank, against indices assigned by hand."""

from __future__ import annotations

import torch

import distconv as dc
from distconv.layers.common.block_edges import (
    balanced_edges,
    distribution_from_edges,
    edges_of,
    gather_cyclic_dims,
    owned_indices,
)
from tests.distconv.layouts import grid_over, normal


def test_balanced_blocks_differ_by_one_at_most_the_longer_ones_first():
    assert balanced_edges(7, 3) == (0, 3, 5, 7)
    assert balanced_edges(2, 3) == (0, 1, 2, 2)


def test_the_indices_of_a_rank_are_those_dealt_to_it(comm):
    grid = grid_over(comm, w=comm.size)
    for size in (1, 2):
        x = dc.scatter(normal(2, 11), dc.Distribution(grid, (None, "w"), cyclic={"w": size}))
        mine = [i for i in range(11) if i // size % comm.size == comm.rank]
        assert owned_indices(x, 1).tolist() == mine and owned_indices(x, 0).tolist() == [0, 1]
        assert gather_cyclic_dims(x, [0]) is x
        whole = gather_cyclic_dims(x, [1])
        assert torch.equal(whole.local, normal(2, 11)) or comm.size == 1


def test_edges_of_balanced_blocks_leave_no_trace(comm):
    grid = grid_over(comm, h=comm.size)
    edges = balanced_edges(9, comm.size)
    assert distribution_from_edges(grid, ("h",), {"h": edges}) == dc.Distribution(grid, ("h",))
    uneven = (0, *(min(9, e + 1) for e in edges[1:-1]), 9)
    dist = distribution_from_edges(grid, ("h", None), {"h": uneven})
    assert edges_of(dist, 0, 9) == uneven and edges_of(dist, 1, 4) == (0, 4)
