"""Reports of stuck ranks: the first one names what each rank does, and the line of the rank that causes the wait."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from distconv.errors import DISAGREEMENT
from distconv.process import stuck_ranks, watchdog
from distconv.process.call_stack import Position
from distconv.process.stuck_ranks import State, _elsewhere
from tests.harness.launch import Job

pytestmark = pytest.mark.mpi

LIMIT_S = 120.0

PROGRAM = """
import ctypes, os, signal, sys, threading, time
from mpi4py import MPI
import torch
import distconv as dc

what, folder = sys.argv[1:]
comm = MPI.COMM_WORLD
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(2, 2, 3, padding=1)
        self.second = torch.nn.Conv2d(2, 2, 5, padding=2)

    def forward(self, x):
        x = self.first(x)
        if what == "layers" and cause:
            return x.sum((2, 3), keepdim=True)
        if what == "forward" and cause:
            time.sleep(60)
        return self.second(x)

def evaluate():
    with torch.no_grad():
        for _ in range(3):
            predict()

def predict():
    return model(image)

def cause_of(what):
    if what == "save":
        dc.save_checkpoint(folder, 2, model)  # cause of save
    if what == "evaluate":
        evaluate()  # cause of evaluate
    if what == "barrier":
        comm.Barrier()  # cause of barrier
    if what == "loop":
        while True: pass  # cause of loop
    if what == "sleep":
        time.sleep(60)  # cause of sleep
    if what == "library":
        threading.Event().wait(60)  # cause of library
    if what == "interpreter":
        ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock
    if what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "slow":
        time.sleep(5)  # cause of slow

grid = dc.ProcessGrid(comm, h=comm.size)
model = dc.parallelize(Net(), grid)
image = dc.scatter(torch.randn(2, 2, 9, 8), grid)
for step in range(4):
    cause = step == 2 and comm.rank == 0
    loss = model(image).square().mean()  # cause of layers, cause of forward
    loss.backward()
    if cause:
        cause_of(what)
print("finished", flush=True)
"""


def line_of(what: str) -> int:
    return next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if f"cause of {what}" in line)


def run(folder: Path, what: str, ranks: int = 2, timeout_s: float = 6.0) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(PROGRAM)
    env = {"DISTCONV_TIMEOUT_S": f"{timeout_s:g}"}
    with Job(ranks, script, what, str(folder / "checkpoints"), env=env) as job:
        return job.wait(LIMIT_S)


def reports(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """The reports that a job has printed, each from its headline to its last line."""
    return re.findall(r"^distconv: rank \d+ has waited .*\n(?:    .*\n)+", ended.stderr, re.M)


slow = pytest.mark.slow


@pytest.mark.fault(113)
@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("save", "save_checkpoint"),
        ("barrier", "user code"),
        ("loop", "user code"),
        ("layers", "sum of Net"),
        pytest.param("sleep", "user code", marks=slow),
        pytest.param("library", "threading.", marks=slow),
        pytest.param("forward", "the forward pass of a module", marks=slow),
    ],
)
def test_the_first_report_names_the_rank_and_the_line_that_cause_a_hang(tmp_path, what, call):
    ended = run(tmp_path, what)
    assert ended.returncode == watchdog.ABORT_CODE, ended.stderr
    first, last = reports(ended)[0], reports(ended)[-1]
    headline = first.splitlines()[0]
    assert re.match(r"distconv: rank [01] has waited [34] s in ", headline), first
    assert f"rank 0 in {call}" in headline and f"line {line_of(what)}" in first, first
    assert f"    rank 0 in {call}" in first and "    rank 1 in " in first
    if what not in ("save", "layers", "forward"):
        assert re.search(r"^    rank 1 in .*, waiting \d s in agreement on forward pass of Net$", first, re.M), first
        assert f"train.py, line {line_of('layers')}: loss = model(image).square().mean()" in first
    assert "(the job ends when a rank has waited DISTCONV_TIMEOUT_S=6 seconds)" in first
    assert "rank 0 in" in last
    for rank in (0, 1):
        assert ended.stderr.count(f"distconv: stacks of rank {rank}\n") == 1


def test_a_rank_that_evaluates_alone_ends_the_job_at_once(tmp_path):
    ended = run(tmp_path, "evaluate")
    assert ended.returncode == DISAGREEMENT, ended.stderr
    assert (
        "forward pass of Net: ranks disagree: in train(), under no_grad on rank 0; in train() on rank 1" in ended.stderr
    )


@pytest.mark.slow
def test_one_rank_reports_for_all_that_wait(tmp_path):
    ended = run(tmp_path, "sleep", ranks=3)
    first = [report for report in reports(ended) if "the job ends when" in report]
    assert len(first) == 1, ended.stderr
    assert first[0].startswith("distconv: rank 1 has waited")
    assert re.search(r"^    ranks? (1-)?2 in .*, waiting \d s in agreement on forward pass of Net$", first[0], re.M), (
        first
    )


def test_a_rank_that_was_only_slow_is_reported_and_the_training_goes_on(tmp_path):
    ended = run(tmp_path, "slow", timeout_s=8.0)
    assert (ended.returncode, ended.stdout.count("finished")) == (0, 2), ended.stderr
    (report,) = reports(ended)
    assert f"elsewhere: rank 0 in user code at {tmp_path}/train.py, line {line_of('slow')}" in report


@pytest.mark.fault(113)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "why"), [("interpreter", "Python's interpreter lock"), ("stopped", "rank 0 (process ")]
)
def test_a_rank_that_cannot_answer_is_named(tmp_path, what, why):
    ended = run(tmp_path, what)
    assert ended.returncode == watchdog.ABORT_CODE, ended.stderr
    assert "elsewhere: rank 0 (no answer)" in reports(ended)[0]
    assert "    rank 0 no answer: " in reports(ended)[0] and why in reports(ended)[0]


NO_GRID = """
import time
from mpi4py import MPI
import distconv as dc
if MPI.COMM_WORLD.rank == 1:
    time.sleep(60)
dc.ProcessGrid(n=2)
"""


def test_a_first_grid_that_other_ranks_do_not_make_is_reported():
    with Job(2, NO_GRID, env={"DISTCONV_TIMEOUT_S": "6"}) as job:
        ended = job.wait(LIMIT_S)
    assert ended.returncode == watchdog.ABORT_CODE, ended.stderr
    first = ended.stderr.partition("ending the job")[0]
    assert "rank 0 has waited 3 s in the start of distconv on 2 ranks, for" in first
    assert "line 7" in first and "they have made no grid with it" in first


FEWER = """
from mpi4py import MPI
import distconv as dc
world = MPI.COMM_WORLD
ranks = world.Split(min(world.rank, 1), world.rank)
if world.rank:
    dc.ProcessGrid(ranks, n=2)
    dc.Plan.load("plan.json")
else:
    world.recv(source=1)
"""


@pytest.mark.slow
def test_ranks_of_the_job_that_made_no_grid_are_counted():
    with Job(3, FEWER, env={"DISTCONV_TIMEOUT_S": "6"}) as job:
        ended = job.wait(LIMIT_S)
    assert ended.returncode == watchdog.ABORT_CODE, ended.stderr
    report = reports(ended)[0]
    assert "all ranks wait in the same call" in report and "    ranks 1-2 in Plan.load, waiting " in report
    assert "    1 more rank of the job made no grid with these: pass comm= to calls without them\n" in report


def waits(line: int) -> State:
    return State(Position("conv2d", (("train.py", line),)), "halo exchange", 30.0)


def runs(line: int) -> State:
    return State(Position("", (("train.py", line),)))


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([waits(7), waits(7)], "all ranks wait in the same call"),
        ([runs(9), waits(7), waits(7)], "elsewhere: rank 0 in user code at train.py, line 9"),
        ([waits(9), waits(7), waits(7)], "elsewhere: rank 0 in conv2d at train.py, line 9"),
        ([None, waits(7), waits(9)], "elsewhere: rank 0 (no answer)"),
        ([State(Position(), has_left=True), waits(7)], "elsewhere: rank 0 in the end of its program"),
        (
            [waits(9), waits(7)],
            "the ranks are in different calls: rank 0 in conv2d at train.py, line 9; "
            "rank 1 in conv2d at train.py, line 7",
        ),
    ],
)
def test_ranks_that_are_not_where_most_wait_are_elsewhere(states, text):
    groups: dict[object, list[int]] = {}
    for rank, state in enumerate(states):
        groups.setdefault(state and state.place, []).append(rank)
    assert _elsewhere(groups, dict(enumerate(states))) == text


def test_a_process_that_is_stopped_or_gone_is_told_from_one_that_waits(monkeypatch):
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setitem(stuck_ranks.processes, 7, process.pid)
    assert stuck_ranks.idle() == ""
    for number, state in ((signal.SIGSTOP, "stopped"), (signal.SIGKILL, "gone")):
        process.send_signal(number)
        until = time.monotonic() + 20
        while stuck_ranks.idle() != f"rank 7 (process {process.pid}) is {state}; ":
            assert time.monotonic() < until
            time.sleep(0.01)
    process.wait()
    assert "is gone" in stuck_ranks.idle()
