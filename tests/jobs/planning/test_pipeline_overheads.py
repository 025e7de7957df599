"""Overheads of pipelined steps: measured on ranks, or assumed of a machine that is described."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.jobs.planning import pipeline_overheads
from distconv.jobs.planning.pipeline_overheads import assumed_overheads, measured_overheads
from distconv.perfmodel import Machine
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Overlap
from distconv.pipeline.schedules.actions import Kind


def test_messages_occupy_the_ranks_of_a_machine_that_hides_none() -> None:
    machine = Machine.load("localhost")
    assert assumed_overheads(machine).blocking
    hiding = replace(machine, overlap=Overlap(halo=True, allreduce=True))
    assert not assumed_overheads(hiding).blocking
    assert assumed_overheads(machine).pass_s == assumed_overheads(machine).update_s_per_byte == 0


@pytest.mark.ranks(1, 2, 3)
def test_what_is_measured_is_the_same_on_all_ranks_and_takes_time(comm: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    found = measured_overheads(Machine.load("localhost"), model, torch.randn(2, 64), comm)
    assert found.pass_s > 0 and found.update_s_per_byte > 0 and found.blocking
    assert (found.message_s == found.join_s == 0) or comm.size > 1
    assert comm.allgather(found) == [found] * comm.size


@pytest.mark.parametrize(("ranks", "message_s"), [(1, 0.0), (2, 3.0), (5, 1.5)])
def test_messages_are_what_a_chain_adds_to_a_pass_two_of_them_between_others(
    ranks: int, message_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm: Any = SimpleNamespace(size=ranks, allreduce=lambda value, op: value)
    monkeypatch.setattr(pipeline_overheads, "_pass_s", lambda count, of: 4.0 if count == 1 else 7.0)
    monkeypatch.setattr(pipeline_overheads, "_joined_update_s", lambda model, samples, of: 9.0)
    monkeypatch.setattr(pipeline_overheads, "_update_s_per_byte", lambda model: 0.05)
    machine = Machine.load("localhost")
    found = measured_overheads(machine, torch.nn.Linear(4, 4), torch.zeros(2, 4), comm)
    assert (found.pass_s, found.message_s) == (4.0, message_s)
    summed = machine.allreduce(RankGroup(ranks, min(ranks, machine.ranks_per_node)), 80) if ranks > 1 else 0.0
    assert found.join_s == pytest.approx(0.0 if ranks == 1 else 9.0 - 0.05 * 80 - summed)


def test_a_pass_is_a_micro_batch_more_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that tells 5 s for each micro-batch of a step, forward and backward, and 100 s for each step."""
    asked: list[int] = []

    def step(x: torch.Tensor, target: torch.Tensor) -> None:
        assert x.shape == target.shape == (len(x), 1) and not x.any()
        asked.append(len(x))

    def pipeline(stages: Any, *others: Any) -> Any:
        assert [parameter.item() for stage in stages for parameter in stage.parameters()] == [1.0] * 6
        assert others == (MPI.COMM_SELF, "gpipe", torch.nn.functional.mse_loss, pipeline_overheads.MICROBATCHES)
        return SimpleNamespace(step=step, close=lambda: asked.append(0))

    monkeypatch.setattr(pipeline_overheads, "Pipeline", pipeline)
    monkeypatch.setattr(pipeline_overheads, "_median", lambda action: (action(), 100.0 + 5.0 * asked[-1])[1])
    assert pipeline_overheads._pass_s(3, MPI.COMM_SELF) == pytest.approx(2.5)
    assert asked == [pipeline_overheads.MICROBATCHES, 1, 0]
    assert pipeline_overheads.MICROBATCHES == 32


def test_an_optimizer_is_timed_with_gradients_and_per_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven steps after one that makes the state, of copies of the weights."""
    clock = iter((0.0, 9.0, 10.0, 11.0, 20.0, 25.0, 30.0, 33.0, 40.0, 47.0, 50.0, 52.0, 60.0, 64.0))
    monkeypatch.setattr(pipeline_overheads, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    calls: list[int] = []
    assert pipeline_overheads._median(lambda: calls.append(1)) == 4.0 and len(calls) == 8
    made: list[torch.optim.Optimizer] = []

    class Recorded(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float, **options: Any) -> None:
            assert options == {"momentum": 0.9}
            super().__init__(parameters, lr, **options)
            made.append(self)

    monkeypatch.setattr(torch.optim, "SGD", Recorded)
    monkeypatch.setattr(pipeline_overheads, "_median", lambda step: (step(), 30.0)[1])
    model = torch.nn.Linear(4, 3).double()
    assert pipeline_overheads._update_s_per_byte(model) == 30.0 / (15 * 8)
    (optimizer,) = made
    assert len(optimizer.state) == 2 and not any(p is q for p in optimizer.state for q in model.parameters())


def test_an_update_of_replicas_is_the_fastest_rank_s_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    def span(kind: Kind, seconds: float) -> Any:
        return SimpleNamespace(action=SimpleNamespace(kind=kind), start=1.0, end=1.0 + seconds)

    @contextlib.contextmanager
    def traced() -> Iterator[Any]:
        yield lambda: SimpleNamespace(
            spans=[
                span(Kind.F, 0.0),
                span(Kind.UPDATE, 8.0),
                span(Kind.UPDATE, (100.0, 3, 1, 4, 2, 7, 5, 6)[len(steps) - 1]),
            ]
        )

    def pipeline(*given: Any) -> Any:
        (_,), comm, name, loss, microbatches, replicas, optimizer = given
        assert (comm.size, name, microbatches, replicas) == (3, "gpipe", 3, 3)
        assert loss(torch.tensor([1.0, 3.0]), None) == 5 and optimizer.keywords == {"lr": 0.0, "momentum": 0.9}
        return SimpleNamespace(traced=traced, step=lambda *given: steps.append(given), close=lambda: None)

    monkeypatch.setattr(pipeline_overheads, "Pipeline", pipeline)
    comm: Any = SimpleNamespace(size=3)
    assert pipeline_overheads._joined_update_s(torch.nn.Linear(4, 4), torch.arange(8.0).view(2, 4), comm) == 4.0
    assert len(steps) == 8 and steps[0][0].shape == (6, 4) and steps[0][1].shape == (6,)
