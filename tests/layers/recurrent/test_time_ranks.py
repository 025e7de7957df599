"""Ranks among which the steps of a sequence are split: their neighbours, and the messages between them."""

from __future__ import annotations

import pytest
import torch

from distconv.layers.recurrent.time_ranks import TimeRanks
from tests.distconv.layouts import grid_over, normal


def test_neighbours_follow_the_direction(comm):
    grid = grid_over(comm, w=comm.size)
    onward, backward = (TimeRanks(grid, "w", 3, reverse) for reverse in (False, True))
    assert onward.earlier == backward.later == (comm.rank - 1 if comm.rank else None)
    assert onward.later == backward.earlier == (comm.rank + 1 if comm.rank + 1 < comm.size else None)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_state_goes_from_rank_to_rank(comm, reverse):
    ranks = TimeRanks(grid_over(comm, w=comm.size), "w", 3, reverse)
    state = ranks.receive(ranks.earlier, torch.zeros(2, 3, dtype=torch.float64)) + 1
    ranks.send(ranks.later, state).wait()
    assert state.unique().item() == (comm.size - comm.rank if reverse else comm.rank + 1)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_ranks_brings_what_the_later_ones_made(comm, reverse):
    ranks = TimeRanks(grid_over(comm, w=comm.size), "w", 3, reverse)
    maps = [(normal(2, 4, 4, seed=rank) / 2, normal(2, 4, seed=50 + rank)) for rank in range(comm.size)]
    expected, order = torch.zeros(2, 4, dtype=torch.float64), range(comm.size) if reverse else range(comm.size)[::-1]
    for rank in order:
        if rank == comm.rank:
            break
        matrix, shift = maps[rank]
        expected = (matrix @ expected[..., None])[..., 0] + shift
    torch.testing.assert_close(ranks.scan_gradient(*maps[comm.rank]), expected, rtol=1e-12, atol=1e-12)
