"""Communicators that are made and dropped without end, and those that somebody still uses."""

from __future__ import annotations

import gc
import resource

import numpy as np
import pytest
from mpi4py import MPI

import distconv as dc
from distconv.communication.derived import COLLECT_ABOVE, CommunicatorRegistry


@pytest.fixture
def parent(comm):
    """A communicator from which nothing has been derived."""
    found = comm.Dup()
    yield found
    found.Free()


@pytest.mark.long
def test_a_grid_that_is_dropped_gives_its_communicators_back(parent):
    for _ in range(5):
        grid = dc.ProcessGrid(parent, h=parent.size)
        grid.comm("h"), grid.reversed_comm("h"), grid.flat
        first = len(CommunicatorRegistry.get(parent))
        del grid
        gc.collect()
    assert len(CommunicatorRegistry.get(parent)) == first <= 5
    dc.ProcessGrid(parent, n=parent.size).free()
    assert len(CommunicatorRegistry.get(parent)) == 0


@pytest.mark.ranks(at_least=2)
def test_what_one_rank_still_uses_is_freed_on_none(parent):
    grids = [dc.ProcessGrid(parent, h=parent.size)]
    kept = grids[0].comm("h")
    alone = kept if parent.rank == 1 else None
    del grids, kept
    gc.collect()
    after = dc.ProcessGrid(parent, h=parent.size)
    assert len(CommunicatorRegistry.get(parent)) == 2
    assert alone is None or alone.size == parent.size
    del alone, after
    gc.collect()
    dc.ProcessGrid(parent, h=parent.size).free()
    assert len(CommunicatorRegistry.get(parent)) == 0


def test_what_is_derived_from_a_grid_s_world_outlives_the_grid(parent):
    flat = dc.ProcessGrid(parent, h=parent.size).flat
    gc.collect()
    dc.ProcessGrid(parent, w=parent.size).free()
    assert flat.world.allgather(flat.rank) == list(range(parent.size))
    assert flat.comm("n").size == parent.size
    flat.free()


@pytest.mark.ranks(2, 3)
def test_messages_of_two_grids_do_not_meet(parent):
    """Posted in another order on every rank: only their communicators tell them apart."""
    grids = [dc.ProcessGrid(parent, h=parent.size) for _ in range(3)]
    order = np.roll(range(3), parent.rank)
    found = np.full(3, -1)
    peers = {"dest": (parent.rank + 1) % parent.size, "source": (parent.rank - 1) % parent.size}
    sends = [grids[i].world.Isend(np.array([i]), peers["dest"]) for i in order]
    receives = [grids[i].world.Irecv(found[i : i + 1], peers["source"]) for i in reversed(order)]
    MPI.Request.Waitall([*sends, *receives])
    assert found.tolist() == [0, 1, 2]
    for grid in grids:
        grid.free()


@pytest.mark.long
@pytest.mark.ranks(1, 2)
@pytest.mark.time_limit(180)
def test_grids_are_made_and_dropped_without_end(parent):
    """Each remembers layouts, which lie in a cycle with it."""
    most, count = 0, 600
    for number in range(count):
        grid = dc.ProcessGrid(parent, **{"nhw"[number % 3]: parent.size})
        dist = dc.Distribution(grid, ("h", None))
        grid.cached(lambda dist: dist.replicate())(dist)
        assert grid.comm("h").size == grid.shape["h"]
        most = max(most, len(CommunicatorRegistry.get(parent)))
        if number == count // 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert most <= COLLECT_ABOVE + 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 6000  # KiB


def test_the_communicator_for_comparisons_is_freed_with_the_one_it_is_for(parent):
    grid = dc.ProcessGrid(parent, n=parent.size)
    along = grid.comm("n")
    compared = CommunicatorRegistry.get(along).shared_duplicate(along)
    assert CommunicatorRegistry.get(along).shared_duplicate(along) is compared
    compared.Barrier()
    grid.free()
    assert not compared
