"""Traces of all ranks: files that tools read, parts that add up, and the slow rank by name."""

from __future__ import annotations

import json
import time

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.tracing.trace import StepTrace


def step(grid, x, pause=0.0):
    weight = torch.ones(2, 2, 3, 3, requires_grad=True)
    F.conv2d(x, weight, padding=1).square().sum().backward()
    if pause:
        time.sleep(pause)


def inputs(comm):
    grid = dc.ProcessGrid(comm, h=comm.size)
    return grid, dc.scatter(torch.ones(1, 2, 12, 5), grid)


@pytest.mark.ranks(1, 2, 3)
def test_every_rank_leaves_a_file_and_its_parts_add_up(comm, shared_tmp_path):
    grid, x = inputs(comm)
    (shared_tmp_path / "trace").mkdir(exist_ok=True)
    if comm.rank == 0:
        (shared_tmp_path / "trace" / "rank-9.json").write_text("of an earlier one")
    comm.Barrier()
    begun = time.perf_counter()
    with dc.trace(shared_tmp_path / "trace", comm) as traced:
        for number in range(2):
            with traced.step(number):
                step(grid, x)
    elapsed = time.perf_counter() - begun
    names = sorted(path.name for path in (shared_tmp_path / "trace").iterdir())
    assert names == ["merged", *(f"rank-{rank}.json" for rank in range(comm.size))]
    mine = json.loads((shared_tmp_path / "trace" / f"rank-{comm.rank}.json").read_text())
    assert (mine["distributedInfo"]["rank"], mine["distributedInfo"]["world_size"]) == (comm.rank, comm.size)
    assert {"ProfilerStep#0", "ProfilerStep#1", "distconv::conv2d"} <= {e["name"] for e in mine["traceEvents"]}
    merged = json.loads((shared_tmp_path / "trace" / "merged" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in merged} == set(range(comm.size))
    assert [each.rank for each in traced.ranks] == list(range(comm.size))
    for each in traced.ranks:
        assert sum(each.seconds.values()) == pytest.approx(each.total) and 0 < each.total < elapsed
        assert each.seconds["compute"] > 0
        assert comm.size == 1 or each.seconds["halo"] > 0
    assert len(traced.table().splitlines()) == comm.size + 2


@pytest.mark.ranks(2, 3)
def test_a_rank_that_keeps_others_waiting_is_named(comm, shared_tmp_path):
    grid, x = inputs(comm)
    step(grid, x)
    with dc.trace(shared_tmp_path, comm) as traced:
        for _ in range(2):
            step(grid, x, pause=0.3 if comm.rank == comm.size - 1 else 0.0)
    assert traced.table().splitlines()[-1].startswith(f"rank {comm.size - 1} is slow")
    assert traced.ranks[0].seconds["wait"] > 0.2 or traced.ranks[0].seconds["allreduce"] > 0.2


@pytest.mark.ranks(2)
def test_an_error_of_one_rank_is_its_own(comm, shared_tmp_path):
    with pytest.raises(ValueError, match="mine"), dc.trace(shared_tmp_path, comm):
        raise ValueError("mine")
    assert not list(shared_tmp_path.glob("rank-*"))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("last", [4, 9])
def test_some_steps_of_a_training(comm, shared_tmp_path, capsys, last):
    grid, x = inputs(comm)
    with StepTrace(range(3, 6), shared_tmp_path, comm) as steps:
        for number in range(1, last + 1):
            with steps.step(number):
                step(grid, x)
    mine = json.loads((shared_tmp_path / f"rank-{comm.rank}.json").read_text())
    found = {e["name"] for e in mine["traceEvents"] if e["name"].startswith("ProfilerStep#")}
    assert found == {f"ProfilerStep#{number}" for number in range(3, min(last + 1, 6))}
    assert (str(shared_tmp_path) in capsys.readouterr().out) == (comm.rank == 0)
