"""Messages and sums of a replay, and waits that the watchdog sees."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv import recording
from distconv.capture import messages
from distconv.capture.messages import AllReduceStart, ExchangeStart, PersistentExchange, wait_for_requests
from distconv.capture.operations import AllReduce, SendReceive
from distconv.communication.transport import Exchange, allreduce
from distconv.process import watchdog
from tests.distconv.capture.trained import batches, make_step, network
from tests.distconv.layouts import grids


@pytest.mark.cpu
def test_messages_go_round_a_ring_again_and_again(comm):
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent, received = torch.empty(5), torch.empty(5)
    posting, persistent = (
        ExchangeStart(comm, [after], [before]),
        PersistentExchange(comm, [(after, sent)], [(before, received)]),
    )
    for round in range(6):
        sent.fill_(comm.rank + 10 * round)
        wait_for_requests(posting(sent, received) if round % 2 else persistent(), lambda: "ring")
        assert received.tolist() == [before + 10 * round] * 5
    assert len(persistent.requests) == 2


@pytest.mark.cpu
@pytest.mark.parametrize(("operation", "expected"), [(MPI.SUM, sum), (MPI.MAX, max)])
def test_sums_are_taken_in_place(comm, operation, expected):
    summing = AllReduceStart(comm, operation)
    for _ in range(2):
        total = torch.full((3,), float(comm.rank + 1))
        wait_for_requests(summing(total), lambda: "sum")
        assert total.tolist() == [float(expected(range(1, comm.size + 1)))] * 3


def test_waits_are_seen_while_they_last(monkeypatch):
    seen, thread = [], threading.get_ident()
    monkeypatch.setattr(messages, "_wait_all", lambda requests: seen.append(watchdog.waits[thread][1]()))
    wait_for_requests([], lambda: "halo exchange")
    monkeypatch.undo()
    with pytest.raises(TypeError):
        wait_for_requests([None], lambda: "halo exchange")
    assert seen == ["halo exchange"] and thread not in watchdog.waits


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
def test_messages_and_sums_in_a_pause_are_not_recorded(comm):
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    def step(x):
        with recording.paused():
            Exchange(comm, [(after, torch.ones(2))], [(before, torch.zeros(2))], "a ring").wait()
            allreduce(comm, torch.ones(2), "a sum")
        return x * 2

    x = dc.scatter(torch.ones(6), grids(comm, "h")[0], dims="h")
    captured = dc.capture(step, x)
    (replay,) = captured._replays.values()
    assert [type(op).__name__ for op in replay.run.recording.operations] == ["OperatorCall"]


@pytest.mark.ranks(2, 3)
def test_messages_of_a_replay_are_persistent(comm):
    """So are halo exchanges and redistributions up to 1 MiB and sums over two ranks. Others start anew each time."""
    for grid in grids(comm, "hc"):
        model = dc.parallelize(network(), grid)
        step = dc.capture(make_step(model), *batches(grid, 1, shape=(4, 2, 9, 250))[0])
        (replay,) = step._replays.values()
        posts = [op for op in replay.run.recording.operations if isinstance(op, SendReceive)]
        sent = sum(len(op.sends) + len(op.receives) for op in posts)
        sums = [op for op in replay.run.recording.operations if isinstance(op, AllReduce)]
        assert sums
        assert replay._program.requests == sent + (2 * len(sums) if comm.size == 2 else 0)


@pytest.mark.ranks(2)
def test_sums_of_two_ranks_have_the_bits_of_mpis(comm):
    generator = torch.Generator().manual_seed(comm.rank)
    for dtype in (torch.float32, torch.float64):
        values = torch.randn(1000, generator=generator, dtype=dtype) * 10.0 ** torch.arange(-50, 50).repeat(10)
        values[:4] = torch.tensor([0.0, -0.0, float("inf"), 1.0])

        def step(x):
            return allreduce(comm, x * 3, "sum")

        taken = dc.capture(step, values)
        expected = step(values)
        assert torch.equal(taken(values).view(torch.uint8), expected.view(torch.uint8))
        (replay,) = taken._replays.values()
        assert replay._program.requests == 2


@pytest.mark.parametrize("captured", [True, False])
def test_steps_keep_no_tensors_objects_or_descriptors(comm, captured):
    grid = grids(comm, "h")[0]
    model, held = dc.parallelize(network(), grid), []
    given = [batches(grid, 1, (4, 2, rows, 8))[0] for rows in (9, 10, 11)]
    step = make_step(model)
    taken = dc.capture(step, *given[0], on_change="record") if captured else step
    for number in range(150):
        model.zero_grad()
        taken(*given[number % 3 if number < 30 or not captured else 0])
        if number % 50 == 49:
            gc.collect()
            objects = gc.get_objects()
            tensors = sum(issubclass(type(each), torch.Tensor) for each in objects)
            held.append((len(objects), tensors, len(os.listdir("/proc/self/fd"))))
    (objects, tensors, descriptors), after = held[1:]
    # One for each of the 50 steps between would be more.
    assert after[0] < objects + 50 and after[1] < tensors + 40 and after[2] == descriptors
