"""Messages and sums of a replay, and waits that the watchdog sees."""

from __future__ import annotations

import threading

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.capture.entries import Post, Sum
from distconv.capture.messages import Persistent, Posting, Summing, raise_together, wait
from distconv.communication.transport import allreduce
from distconv.process import watchdog
from tests.distconv.capture.trained import batches, network, step_of
from tests.distconv.layouts import grids


@pytest.mark.cpu
def test_messages_go_round_a_ring_again_and_again(comm):
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    posting = Posting(comm, [after], [before])
    for round in range(3):
        sent, received = torch.arange(5.0) + comm.rank + 10 * round, torch.empty(5)
        wait(posting(sent, received), lambda: "ring")
        assert received.tolist() == (torch.arange(5.0) + before + 10 * round).tolist()


@pytest.mark.cpu
@pytest.mark.parametrize(("operation", "expected"), [(MPI.SUM, sum), (MPI.MAX, max)])
def test_sums_are_taken_in_place(comm, operation, expected):
    summing = Summing(comm, operation)
    for _ in range(2):
        total = torch.full((3,), float(comm.rank + 1))
        wait(summing(total), lambda: "sum")
        assert total.tolist() == [float(expected(range(1, comm.size + 1)))] * 3


def test_waits_are_seen_while_they_last(comm):
    seen = []

    class Request:
        @staticmethod
        def waitall(requests):
            seen.append(watchdog.waits[threading.get_ident()][1]())

    from distconv.capture import messages

    before, messages._wait_all = messages._wait_all, Request.waitall
    try:
        wait([], lambda: "halo exchange")
    finally:
        messages._wait_all = before
    assert seen == ["halo exchange"]
    assert threading.get_ident() not in watchdog.waits


def test_a_wait_that_fails_is_over():
    with pytest.raises(TypeError):
        wait([None], lambda: "halo exchange")
    assert threading.get_ident() not in watchdog.waits


def test_a_failure_of_one_rank_is_one_of_all(comm):
    raise_together(comm, None)
    with pytest.raises(dc.NumericalError, match="too large"):
        raise_together(comm, ValueError("too large") if comm.rank == 0 else None)


@pytest.mark.cpu
def test_persistent_messages_go_again_and_again_in_the_same_memory(comm):
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent, received = torch.empty(4), torch.empty(4)
    persistent = Persistent(comm, [(after, sent)], [(before, received)])
    for round in range(3):
        sent.fill_(comm.rank + 10 * round)
        wait(persistent(), lambda: "ring")
        assert received.tolist() == [before + 10 * round] * 4
    assert len(persistent.requests) == 2


@pytest.mark.ranks(2, 3)
def test_messages_of_a_replay_are_persistent(comm):
    """Of halos and redistributions of small blocks, and sums of two ranks; those of more are started each time."""
    for grid in grids(comm, "hc"):
        batch = batches(grid, 1)[0]
        model = dc.parallelize(network(), grid)
        step = dc.capture(step_of(model), *batch)
        (replay,) = step._replays.values()
        posts = [entry for entry in replay.run.recording.entries if isinstance(entry, Post)]
        messages = sum(len(entry.sends) + len(entry.receives) for entry in posts)
        sums = [entry for entry in replay.run.recording.entries if isinstance(entry, Sum)]
        assert sums
        assert replay._program.requests == messages + (2 * len(sums) if comm.size == 2 else 0)


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


ENDS = """
import os, signal, sys
import torch
from torch import nn
import distconv as dc
from distconv.capture import messages

grid = dc.ProcessGrid(h=2)
torch.manual_seed(0)
model = dc.parallelize(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)), grid)
x = dc.scatter(torch.randn(2, 2, 9, 8), grid)

def step(x):
    loss = model(x).square().mean()
    loss.backward()
    return loss

taken = dc.capture(step, x)
for _ in range(3):
    taken(x)
waited, calls = messages._wait_all, []

def failing(requests):
    calls.append(1)
    if grid.rank == 1 and len(calls) == 5:
        exec(sys.argv[1])
    waited(requests)

messages._wait_all = failing
while True:
    taken(x)
"""


@pytest.mark.mpi
@pytest.mark.time_limit(120)
@pytest.mark.parametrize(
    ("how", "words", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "in the replay of ", watchdog.ABORT_CODE),
        ("raise ValueError('mine')", "ValueError: mine", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", "", None),
    ],
)
def test_a_rank_that_stops_raises_or_dies_in_a_replay_ends_the_job(mpiexec, how, words, code):
    ended = mpiexec(2, ENDS, how, timeout=90, env={"DISTCONV_TIMEOUT_S": "3"})
    assert ended.returncode == code if code else ended.returncode
    assert words in ended.stderr


FLAT = """
import gc, os
import torch
from torch import nn
import distconv as dc

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

grid = dc.ProcessGrid(h=2)
torch.manual_seed(0)
layers = [m for _ in range(4) for m in (nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())]
model = dc.parallelize(nn.Sequential(*layers), grid)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = dc.scatter(torch.randn(2, 2, 64, 64), grid)

def step(x):
    loss = model(x).square().mean()
    loss.backward()
    return loss

taken = dc.capture(step, x)
seen = []
for number in range(1200):
    optimizer.zero_grad()
    taken(x)
    optimizer.step()
    if number % 200 == 199:
        gc.collect()
        seen.append((len(os.listdir("/proc/self/fd")), len(gc.get_objects()), rss()))
descriptors, objects, memory = zip(*seen)
assert len(set(descriptors)) == 1, descriptors
assert max(objects[1:]) - min(objects[1:]) < 50, objects
assert memory[-1] - memory[1] < 2 << 20, memory
print("flat", seen)
"""


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_a_thousand_replays_leave_memory_descriptors_and_objects_as_they_were(mpiexec):
    """256 kB of activations a step: a tensor that each replay left behind would be seen."""
    ended = mpiexec(2, FLAT, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("flat") == 2
