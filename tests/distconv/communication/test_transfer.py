"""The mover against slicing: any layout to any other, halos of any shape, and their adjoints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import distconv as dc
import distconv.grid
from distconv.arrangement import Arrangement
from distconv.communication import collectives
from distconv.communication.transfer import transfer_plan
from tests.distconv.communication.drawn_layouts import FEW, needed_box, needs, shapes
from tests.distconv.layouts import counting, cut, grid_over, normal


@FEW
@given(st.data())
def test_the_needed_box_arrives_whatever_each_rank_needs(comm, data):
    shape = data.draw(shapes)
    layout = data.draw(needs(comm, shape))
    whole = counting(*shape)
    found = collectives.gather_region(cut(whole, layout.base), transfer_plan(layout.base, layout, shape))
    box = needed_box(layout, shape)
    if box is None:
        assert found.numel() == 0
    else:
        assert torch.equal(found, whole[tuple(slice(*i) for i in box)])


@FEW
@given(st.data())
def test_ghost_slabs_cover_what_is_needed_and_not_owned_once(comm, data):
    shape = data.draw(shapes)
    layout = data.draw(needs(comm, shape))
    whole = counting(*shape)
    plan = transfer_plan(layout.base, layout, shape, ghosts=True)
    parts = plan.start(cut(whole, layout.base)).finish()
    for part, box in zip(parts, plan.destinations, strict=True):
        assert torch.equal(part, whole[tuple(slice(*i) for i in box)])
    found = sorted(float(value) for part in parts for value in part.flatten())
    box = needed_box(layout, shape)
    wanted = torch.zeros(shape, dtype=torch.bool)
    if box is not None:
        wanted[tuple(slice(*i) for i in box)] = True
    wanted[tuple(slice(*i) for i in layout.base.box(None, shape))] = False
    assert found == whole[wanted].tolist()


@FEW
@given(st.data())
def test_ghosts_that_go_back_add_up_at_their_owners(comm, data):
    shape = data.draw(shapes)
    layout = data.draw(needs(comm, shape))
    plan = transfer_plan(layout.base, layout, shape, ghosts=True)
    x = cut(normal(*shape), layout.base)
    parts = plan.start(x).finish()
    returned = [normal(*part.shape, seed=7 * comm.rank + i) for i, part in enumerate(parts)]
    forward = sum(float((part * back).sum()) for part, back in zip(parts, returned, strict=True))
    total = plan.start_accumulate(returned, x).finish(torch.zeros_like(x))
    assert comm.allreduce(forward) == pytest.approx(comm.allreduce(float((x * total).sum())), rel=1e-12, abs=1e-12)


def test_a_replica_is_its_own_source(comm):
    grid = grid_over(comm, n=comm.size)
    plan = transfer_plan(dc.Distribution(grid, (None, None)), dc.Distribution(grid, ("n", None)), (9, 2))
    assert plan.is_local


def test_a_plan_is_built_once(comm):
    src = dc.Distribution(grid_over(comm, n=comm.size), ("n",))
    dst = dc.Distribution(grid_over(comm, n=comm.size), (None,))
    assert transfer_plan(src, dst, (11,)) is transfer_plan(src, dst, (11,))


def _moved(grid: dc.ProcessGrid, rows: int) -> None:
    dist, whole = dc.Distribution(grid, ("n", None)), counting(rows, 2)
    plan = transfer_plan(dist, dist.replicate(), (rows, 2))
    assert torch.equal(plan.move(cut(whole, dist)), whole)


@pytest.mark.ranks(3)
def test_ranks_of_several_grids_forget_the_plans_of_each_as_their_peers_do(comm, monkeypatch):
    """Rank 1 is in both grids and has twice as much to remember."""
    monkeypatch.setattr(distconv.grid, "CACHE_LIMIT", 5)
    groups = [comm.Split(0 if comm.rank in members else MPI.UNDEFINED) for members in ((0, 1), (1, 2))]
    grids = [dc.ProcessGrid(group, n=2) for group in groups if group != MPI.COMM_NULL]
    for rows in (*range(1, 8), 3, 1, 5, *range(9, 1, -1)):
        for grid in grids:
            _moved(grid, rows)


@pytest.mark.ranks(2, 3)
def test_a_rank_that_looks_a_plan_up_once_more_forgets_as_the_others_do(comm, monkeypatch):
    monkeypatch.setattr(distconv.grid, "CACHE_LIMIT", 4)
    with dc.ProcessGrid(comm, n=comm.size) as grid:
        dist = dc.Distribution(grid, ("n", None))
        for rows in (1, 2, 3, 4):
            _moved(grid, rows)
        if comm.rank == 1:
            transfer_plan(dist, dist.replicate(), (1, 2))
        for rows in (5, 2, 1, 3):
            _moved(grid, rows)


# -- between two groups of ranks ---------------------------------------------------------------------------------------


def on_groups(comm):
    """Two groups that share one rank, if there are enough: layouts over each, and the plan between them."""
    sources, targets = list(range(comm.size - comm.size // 2)), list(range(comm.size // 2, comm.size))
    shape = (5, 7)
    src = dc.Distribution(Arrangement(n=len(sources)), ("n", None))
    dst = dc.Distribution(Arrangement(h=len(targets)), (None, "h"))
    return shape, src, dst, dc.TransferPlan(src, dst, shape, comm=comm, sources=sources, targets=targets)


def block_of(whole, dist, ranks, rank):
    """The block of ``rank`` of ``comm``, empty outside the group."""
    if rank not in ranks:
        return whole.new_empty(0)
    return whole[tuple(slice(i.start, i.stop) for i in dist.box(ranks.index(rank), whole.shape))]


def test_a_plan_between_two_groups_fills_the_blocks_of_the_second(comm):
    shape, src, dst, plan = on_groups(comm)
    x = normal(*shape)
    parts = plan.start(block_of(x, src, plan.sources, comm.rank)).finish()
    assert len(parts) == (comm.rank in plan.targets)
    for part in parts:
        assert torch.equal(part, block_of(x, dst, plan.targets, comm.rank))


def test_the_way_back_between_two_groups_is_its_adjoint(comm):
    shape, src, dst, plan = on_groups(comm)
    x, y = normal(*shape), normal(*shape, seed=1)
    mine, theirs = (block_of(t, d, r, comm.rank) for t, d, r in ((x, src, plan.sources), (y, dst, plan.targets)))
    there = sum(((part * theirs).sum().item() for part in plan.start(mine).finish()), 0.0)
    back = sum(((part * mine).sum().item() for part in plan.reversed().start(theirs).finish()), 0.0)
    assert comm.allreduce(there) == pytest.approx(comm.allreduce(back), abs=1e-12)
    added = plan.start_accumulate([theirs] if comm.rank in plan.targets else [], x).finish(torch.zeros_like(mine))
    if comm.rank in plan.sources:
        torch.testing.assert_close(added, block_of(y, src, plan.sources, comm.rank), rtol=0, atol=0)


def test_a_plan_without_a_communicator_is_refused():
    dist = dc.Distribution(Arrangement(n=2), ("n",))
    with pytest.raises(dc.DistributionError, match="Pass comm="):
        dc.TransferPlan(dist, dist, (4,))
