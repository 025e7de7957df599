"""Bad input, and failures of single ranks: an error with names, or the end of the job; never a hang."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.errors import GridError, ShapeError
from distconv.pipeline import Pipeline
from distconv.pipeline.schedules.actions import ScheduleError
from tests.distconv.layouts import raises_everywhere
from tests.harness.launch import Job
from tests.pipeline.training import SGD


def linear(count):
    torch.manual_seed(0)
    return [nn.Linear(2, 2) for _ in range(count)]


REFUSED = {
    "no stages": (0, {}, ScheduleError, "0 stages"),
    "too many stages for the ranks": (3, {}, GridError, r"3 ranks, but the communicator has 2"),
    "stages that are not whole chunks": (
        3,
        {"schedule": "interleaved"},
        ScheduleError,
        "3 stages cannot be divided into 2 chunks on each rank; cut the model into",
    ),
    "no micro-batches": (2, {"microbatches": 0}, ScheduleError, "microbatches=0"),
    "half a micro-batch": (2, {"microbatches": 1.5}, ScheduleError, r"microbatches=1\.5"),
    "an unknown schedule": (2, {"schedule": "no such"}, ScheduleError, "no such"),
    "weights of a synchronous schedule": (2, {"weights": "stash"}, ScheduleError, "weights='stash'"),
    "too many replicas": (2, {"replicas": 2}, GridError, r"2 \+ 2 = 4 ranks, but the communicator has 2"),
    "unknown batch norm": (2, {"batch_norm": "never"}, ScheduleError, "batch_norm='never'"),
    "a grid too few": (2, {"plans": [None]}, GridError, "1 plans for 2 stages"),
    "a grid too large": (2, {"plans": [{"h": 2}, None]}, GridError, "3 ranks"),
}


@pytest.mark.fault(27, 109)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_on_all_ranks(comm, name):
    count, options, kind, words = REFUSED[name]
    given = {"schedule": "gpipe"} | options
    raises_everywhere(comm, kind, words, lambda: Pipeline(linear(count), comm, loss=F.mse_loss, **given))


@pytest.mark.ranks(2)
def test_stages_that_are_no_modules_are_refused(comm):
    torch.manual_seed(0)
    raises_everywhere(
        comm,
        ScheduleError,
        "stage 1 is a builtin",
        lambda: Pipeline([nn.Tanh(), torch.tanh], comm, "gpipe", F.mse_loss),
    )


@pytest.mark.ranks(1, 2)
def test_samples_and_targets_must_be_as_many_and_not_none(comm):
    pipe = Pipeline(linear(comm.size), comm, "gpipe", F.mse_loss, 2, optimizer=SGD)
    x = torch.ones(3, 2)
    for one, two in ((x, x[:2]), (x[:0], x[:0]), (x[0, 0], x), (x, x[0, 0])):
        raises_everywhere(comm, ShapeError, "the same number of samples", lambda one=one, two=two: pipe.step(one, two))
    assert pipe.step(x, x) is not None
    pipe.close()


@pytest.mark.ranks(2)
def test_pipelines_may_come_and_go(comm):
    # MPI libraries have some 2000 communicators.
    for _ in range(450):
        Pipeline([nn.Tanh(), nn.Tanh()], comm, "gpipe", F.mse_loss).close()


# --- Jobs that fail ---

PROGRAM = """
import os, signal, time
import torch
from torch import nn
from mpi4py import MPI
import distconv as dc
from distconv.pipeline import Pipeline
from distconv.pipeline.runtime import p2p

comm = MPI.COMM_WORLD
place = {place!r}
torch.manual_seed(0)

class Fails(nn.Module):
    calls = 0
    def forward(self, x):
        Fails.calls += 1
        if Fails.calls > 2:
            fail()
        return x

class FailsBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        fail()

class Behind(nn.Module):
    def forward(self, x):
        return FailsBehind.apply(x)

def fail_in_send(self, header, payload, what, send=p2p._SendStream.send):
    send(self, header, payload, what)
    fail()

def fail():
    {how}

width = 4
if place == "send" and comm.rank == 0:
    p2p._SendStream.send = fail_in_send
if place == "send":
    width = 1 << 17  # 4 MB: MPI sends them while the receiver takes them
middle = {{"forward": Fails, "backward": Behind}}.get(place, nn.Identity)()
stages = [nn.Linear(4, width), nn.Sequential(nn.Linear(width, 4), middle)]
optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
pipe = Pipeline(stages, comm, {schedule!r}, nn.functional.mse_loss, {microbatches}, optimizer=optimizer)
x = torch.ones(8, 4)
for step in range(4):
    pipe.step(x, x)
pipe.drain()
print("done", flush=True)
time.sleep(30)
"""

OTHER_STEPS = """
import torch
from torch import nn
from mpi4py import MPI
import distconv as dc
from distconv.pipeline import Pipeline
comm = MPI.COMM_WORLD
torch.manual_seed(0)
pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], comm, "stale", nn.functional.mse_loss)
x = torch.ones(2, 4)
for step in range(3):
    pipe.step(x, x)
if comm.rank == 1:
    pipe.drain()
for step in range(4):
    pipe.step(x, x)
pipe.drain()
pipe.synchronize()
"""


def program(place, how, schedule="gpipe", microbatches=2):
    return PROGRAM.format(place=place, how=how, schedule=schedule, microbatches=microbatches)


PROGRAMS = {
    "raises": program("forward", "raise ValueError('only here')"),
    "leaves": program("forward", "os._exit(5)", "stale", 1),
    "killed": program("send", "os.kill(os.getpid(), signal.SIGKILL)", "1f1b-sno"),
    "stopped": program("backward", "os.kill(os.getpid(), signal.SIGSTOP)", "zero-bubble"),
    "does other steps": OTHER_STEPS,
}


@pytest.fixture(scope="module")
def jobs():
    """All of them at once, by what goes wrong: they wait more than they compute."""
    limits = {"stopped": {"DISTCONV_TIMEOUT_S": "8"}}
    with ExitStack() as stack:
        yield {name: stack.enter_context(Job(2, code, env=limits.get(name))) for name, code in PROGRAMS.items()}


def assert_found(pattern, text):
    assert re.search(pattern, text), text


@pytest.mark.fault(45)
@pytest.mark.mpi
def test_an_exception_on_one_rank_ends_the_job_and_names_where_it_was(jobs):
    ended = jobs["raises"].wait(120)
    assert ended.returncode == 1, ended.stderr
    assert_found(r"ValueError: only here\n\s*rank 1, stage 1: F of micro-batch 0", ended.stderr)


@pytest.mark.fault(47)
@pytest.mark.mpi
def test_a_rank_that_is_gone_with_an_error_code_ends_the_job_before_others_are_done(jobs):
    ended = jobs["leaves"].wait(120)
    assert ended.returncode == 5, ended.stderr
    assert ended.stdout == ""


@pytest.mark.fault(48)
@pytest.mark.mpi
def test_a_rank_that_is_killed_in_a_send_ends_the_job(jobs):
    ended = jobs["killed"].wait(120)
    assert ended.returncode in (9, 137), ended.stderr


@pytest.mark.mpi
def test_ranks_that_do_different_steps_end_the_job_with_a_report(jobs):
    ended = jobs["does other steps"].wait(120)
    assert ended.returncode == 1, ended.stderr
    assert_found(r"expects it for step \d from rank \d, but that sends \w of micro-batch", ended.stderr)


@pytest.mark.fault(49)
@pytest.mark.mpi
def test_a_rank_that_is_stopped_ends_the_job_with_a_report(jobs):
    job = jobs["stopped"]
    deadline = time.monotonic() + 100
    while "rank 0 of 2 has waited" not in job.output() and time.monotonic() < deadline:
        time.sleep(0.2)
    output = job.output()
    for pid in job.ranks().values():
        os.kill(pid, signal.SIGCONT)  # else the launcher waits for it
    ended = job.wait(20)
    assert ended.returncode == 75, ended.stderr
    assert_found(r"rank 0 of 2 has waited .* stage 0: B of micro-batch 0 waiting for stage 1", output)
