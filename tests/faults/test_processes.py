"""Ranks of a training that raise, die, stop or leave, wherever they are: the job ends in time, and says who it was."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.launch import Job

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(180)]

LIMIT_S = 120.0

PROGRAM = """
import os, signal, sys, time
import torch
from torch import nn
from mpi4py import MPI
import distconv as dc
from distconv.communication import transport

comm = MPI.COMM_WORLD
place, how, note = sys.argv[1:]
step = 0

def fail_in(where):
    if place == where and step == 2 and comm.rank == comm.size - 1:
        with open(note, "w") as file:
            file.write(str(time.time()))
        exec(how)

class Middle(nn.Module):
    def forward(self, x):
        fail_in("forward")
        return x

def failing(kind, where, words):
    wait = kind.wait
    def failing_wait(self, *more):
        if words in self._what:
            fail_in(where)
        return wait(self, *more)
    kind.wait = failing_wait

failing(transport.Exchange, "halo", "halo")
failing(transport.Reduction, "allreduce", "gradient")
torch.manual_seed(0)
comm.Barrier()  # imports take longer on one rank than on another
grid = dc.ProcessGrid(comm, h=comm.size)
model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Middle(), nn.Conv2d(4, 2, 3, padding=1))
model = dc.parallelize(model, grid)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(2, 2, 9, 8)
while True:
    y = model(dc.scatter(x, grid))
    y.register_hook(lambda grad: fail_in("backward"))
    optimizer.zero_grad()
    y.square().mean().backward()
    optimizer.step()
    step += 1
    if step == 3:
        print("under way", flush=True)
"""

RAISE = "raise ValueError('only here')"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"

slow = pytest.mark.slow


@dataclass
class End:
    """How a job ended: its exit code, what it said, and how long after the fault."""

    code: int
    text: str
    after_s: float


def run(folder: Path, place: str, how: str, **environment: str) -> End:
    """Run the training on 2 ranks, of which the last one fails in ``place``."""
    note = folder / "note"
    with Job(2, PROGRAM, place, how, str(note), env=environment) as job:
        ended = job.wait(LIMIT_S)
        return End(ended.returncode, ended.stderr, time.time() - float(note.read_text()))


REPORT = ("rank 0 of 2 has waited", "halo exchange with peers 1", " is stopped; ending the job")
ENDS = {
    "raises": ("halo", RAISE, {}, (1,), 5, ("rank 1 failed\nTraceback", "ValueError: only here")),
    "raises in backward": ("backward", RAISE, {}, (1,), 5, ("rank 1 failed\nTraceback", "ValueError: only here")),
    "is killed": ("allreduce", KILL, {}, (9, 137), 10, ()),
    "is gone": ("forward", "os._exit(5)", {}, (5,), 10, ()),
    "is stopped": ("halo", STOP, {"DISTCONV_TIMEOUT_S": "6"}, (75,), 16, REPORT),
}
"""Where the last rank fails, how, variables of the job, its exit codes, seconds until then, and what it says."""

SLOW = ("raises in backward", "is gone", "is stopped")


@pytest.mark.fault(45, 47, 48, 49)
@pytest.mark.parametrize("what", [pytest.param(what, marks=slow if what in SLOW else ()) for what in ENDS])
def test_a_rank_that_fails_ends_the_job_soon(tmp_path: Path, what: str) -> None:
    place, how, environment, codes, seconds, texts = ENDS[what]
    end = run(tmp_path, place, how, **environment)
    assert end.code in codes, end.text
    assert end.after_s < seconds
    assert not [text for text in texts if text not in end.text]


def under_way(job: Job) -> None:
    until = time.monotonic() + LIMIT_S
    while "under way" not in job.output():
        assert time.monotonic() < until, job.output()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.fault(51)
def test_interrupting_twice_ends_the_job(tmp_path: Path) -> None:
    with Job(2, PROGRAM, "nowhere", "", str(tmp_path)) as job:
        under_way(job)
        began = time.monotonic()
        os.kill(job.process.pid, signal.SIGINT)
        time.sleep(0.5)
        if job.process.poll() is None:
            os.kill(job.process.pid, signal.SIGINT)
        assert job.wait(LIMIT_S).returncode != 0
        assert time.monotonic() - began < 5


@pytest.mark.slow
@pytest.mark.fault(52)
def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    with Job(2, PROGRAM, "nowhere", "", str(tmp_path)) as job:
        under_way(job)
        job.process.kill()
        until = time.monotonic() + 30
        while job.processes():
            assert time.monotonic() < until, job.output()
            time.sleep(0.1)


APART = """
import sys
import torch
from torch import nn
from mpi4py import MPI
import distconv as dc

comm = MPI.COMM_WORLD
what = sys.argv[1]
torch.manual_seed(0)
comm.Barrier()  # imports take longer on one rank than on another
grid = dc.ProcessGrid(comm, h=2)
model = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 5, padding=2)])
model = dc.parallelize(model, grid)
x = torch.randn(2, 2, 9, 8)
for step in range(3 if what == "layer" or comm.rank else 2):
    y = model[0](dc.scatter(x, grid))
    if what == "batches" or step < 2 or comm.rank:
        y = model[1](y)
    y.tanh().sum().backward()
"""


@pytest.mark.fault(24)
def test_a_layer_that_one_rank_skips_is_told() -> None:
    with Job(2, APART, "layer", env={"DISTCONV_CHECK": "all", "DISTCONV_TIMEOUT_S": "6"}) as job:
        ended = job.wait(LIMIT_S)
    assert ended.returncode == 70, ended.stderr
    assert "MismatchError: ranks are at different operations" in ended.stderr
    assert "conv2d" in ended.stderr and "tanh" in ended.stderr


@pytest.mark.slow
@pytest.mark.fault(25)
def test_fewer_batches_on_one_rank_end_the_job() -> None:
    with Job(2, APART, "batches", env={"DISTCONV_TIMEOUT_S": "6"}) as job:
        ended = job.wait(LIMIT_S)
    assert ended.returncode == 75, ended.stderr
    assert "rank 0 has come to the end of its program, but rank 1 waits in agreement on scatter" in ended.stderr


THREADS = """
import os
del os.environ["OMP_NUM_THREADS"]
import distconv, torch
from mpi4py import MPI
distconv.ProcessGrid(MPI.COMM_WORLD, n=4)
threads = MPI.COMM_WORLD.gather(torch.get_num_threads())
if threads:
    print(threads, len(os.sched_getaffinity(0)))
"""


@pytest.mark.slow
@pytest.mark.fault(55)
def test_ranks_share_the_cores_out() -> None:
    with Job(4, THREADS) as job:
        ended = job.wait(LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    threads, cores = ended.stdout.rsplit(maxsplit=1)
    assert threads == str([max(1, int(cores) // 4)] * 4)
