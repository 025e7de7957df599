"""Process grids: where each rank is, who its neighbours are, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from tests.distconv.layouts import counting, grid_on_paper, grid_over, grids, raises_everywhere


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize(
    ("axis", "extent", "match"),
    [
        ("h", 99, r"99 parts but the communicator has \d ranks"),
        ("x", 1, "unknown axis 'x'; the axes are n, c, d, h, w, r"),
        *(("n", extent, "must be a positive number") for extent in (0, -1, -2, 1.0, True, "2", None)),
    ],
)
def test_a_grid_that_cannot_be_is_refused(comm, axis, extent, match):
    raises_everywhere(comm, dc.GridError, match, lambda: dc.ProcessGrid(comm, **{axis: extent}))
    assert issubclass(dc.GridError, ValueError)


def test_a_communicator_along_axes_holds_the_ranks_that_differ_only_there(comm):
    for grid in grids(comm, "nhw"):
        for count in range(4):
            for axes in itertools.combinations("nhw", count):
                along = grid.comm(axes)
                expected = [
                    rank
                    for rank in range(comm.size)
                    if all(grid.coords_of(rank)[a] == c for a, c in grid.coords.items() if a not in axes)
                ]
                assert along.allgather(comm.rank) == expected
                assert grid.comm(axes) is along


def test_a_communicator_along_an_unsplit_axis_is_of_this_rank_alone(comm):
    grid = grid_over(comm, h=comm.size)
    assert grid.comm("w").size == 1
    assert grid.comm(("w", "h")) is grid.comm("h")


def test_traffic_of_a_grid_does_not_meet_messages_on_its_communicator(comm):
    grid = dc.ProcessGrid(comm, n=comm.size)
    assert MPI.Comm.Compare(grid.world, comm) == MPI.CONGRUENT


def test_grids_of_the_same_extents_over_the_same_ranks_are_the_same(comm):
    first, again = dc.ProcessGrid(comm, h=comm.size), dc.ProcessGrid(comm, h=comm.size)
    assert first == again
    assert (first == grid_over(comm, w=comm.size)) == (comm.size == 1)


@pytest.mark.ranks(2, 4, 6, 8)
def test_grids_over_other_ranks_are_others(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    mine = dc.ProcessGrid(half, h=half.size)
    keys = comm.allgather(mine.key)
    assert keys[0] != keys[1]
    assert keys[0] == keys[comm.size - 2]
    half.Free()


def test_the_flat_grid_is_one_row_of_the_same_ranks(comm):
    flat = grid_over(comm, h=comm.size).flat
    assert flat.shape["n"] == comm.size
    assert flat.rank == comm.rank


def test_an_equal_grid_works_after_one_was_freed(comm):
    """Values cached for the first grid must not be used with the second."""
    weight, x = counting(2, 2, 3, 3), counting(2, 2, 7, 8)
    for _ in range(3):
        with dc.ProcessGrid(comm, h=comm.size) as grid:
            part = dc.scatter(x, grid)
            y = F.conv2d(torch.cat([part, part], 3)[:, :, 1:].reshape(2, 2, 6, 16), weight, padding=1)
            assert y.gather().shape == (2, 2, 6, 16)


@pytest.mark.fault(28)
@pytest.mark.ranks(at_least=2)
def test_what_is_on_a_freed_grid_says_so(comm):
    with dc.ProcessGrid(comm, h=comm.size) as grid:
        x = dc.scatter(counting(2, 2, 8, 3), grid)
    raises_everywhere(comm, dc.CommunicatorError, "freed", x.gather)
    raises_everywhere(comm, dc.CommunicatorError, "freed", lambda: grid.comm("h"))


def test_a_failure_inside_a_grid_s_block_frees_nothing(comm):
    with pytest.raises(RuntimeError, match="mine"), dc.ProcessGrid(comm, n=comm.size) as grid:
        raise RuntimeError("mine")
    assert grid.comm("n").size == comm.size
    grid.free()


@pytest.mark.fault(28)
def test_a_null_or_freed_communicator_is_refused(comm):
    freed = comm.Dup()
    freed.Free()
    for bad in (MPI.COMM_NULL, freed):
        with pytest.raises(dc.CommunicatorError, match="COMM_NULL"):
            dc.ProcessGrid(bad, n=1)
    assert np.array_equal(comm.allgather(comm.rank), range(comm.size))


def test_a_grid_prints_as_users_write_it():
    assert repr(grid_on_paper(n=2, h=3)) == "OnPaper(n=2,h=3, 6 ranks)"
    assert grid_on_paper().describe() == "n=1"


def test_a_reversed_communicator_has_the_ranks_the_other_way_round(comm):
    with dc.ProcessGrid(comm, w=comm.size) as grid:
        found = grid.reversed_comm("w")
        assert found.rank == comm.size - 1 - comm.rank
        assert grid.reversed_comm("w") is found


def test_without_a_communicator_it_takes_all_ranks(comm):
    with dc.ProcessGrid(h=comm.size) as grid:
        assert (grid.size, grid.rank) == (comm.size, comm.rank)
        assert dc.gather(dc.scatter(torch.arange(5), grid, dims="h")).tolist() == [0, 1, 2, 3, 4]


def test_a_grid_forgets_all_results_when_it_has_many(comm, monkeypatch):
    monkeypatch.setattr(dc.grid, "CACHE_LIMIT", 3)
    calls = []
    remembered = dc.ProcessGrid(comm, n=comm.size).cached(lambda number: calls.append(number) or -number)
    assert [remembered(number) for number in (0, 1, 2, 0, 1, 3, 0, 3)] == [0, -1, -2, 0, -1, -3, 0, -3]
    assert calls == [0, 1, 2, 3, 0]
