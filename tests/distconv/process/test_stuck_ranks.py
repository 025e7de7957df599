"""Reports of stuck ranks: the first one names what each rank does, and the line of the rank that causes the wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from distconv.process import stuck_ranks, watchdog
from distconv.process.call_stack import Position
from distconv.process.stuck_ranks import RankState, _describe_other_ranks
from tests.harness.launch import Job

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(180)]

LIMIT_S = 120.0

Ended = dict[str, tuple[subprocess.CompletedProcess[str], Path]]

PROGRAM = """
import os, signal, sys, time
from mpi4py import MPI
import torch
import distconv as dc

causes, folder = sys.argv[1].split(","), sys.argv[2]
comm = MPI.COMM_WORLD
torch.manual_seed(0)

class Released(Exception):
    pass

def release(*_):
    raise Released

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(2, 2, 3, padding=1)
        self.second = torch.nn.Conv2d(2, 2, 5, padding=2)

    def forward(self, x):
        x = self.first(x)
        if what == "layers":
            return x.sum((2, 3), keepdim=True)
        return self.second(x)

def cause_of(what):
    if what == "save":
        dc.save_checkpoint(folder, 2, model)  # cause of save
    if what == "loop":
        while True: pass  # cause of loop
    if what == "sleep":
        time.sleep(60)  # cause of sleep

signal.signal(signal.SIGUSR1, release)
comm.Barrier()
grid = dc.ProcessGrid(comm, h=comm.size)
model = dc.parallelize(Net(), grid)
image = dc.scatter(torch.randn(2, 2, 9, 8), grid)
for cause in [None, *causes, None]:
    what = cause if comm.rank == 0 else None
    loss = model(image).square().mean()  # cause of layers
    loss.backward()
    try:
        cause_of(what)
    except Released:
        pass
print("finished", flush=True)
"""


NO_GRID = """
import time
from mpi4py import MPI
import distconv as dc
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    time.sleep(60)
dc.ProcessGrid(n=2)
"""


def line_of(what: str) -> int:
    return next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if f"cause of {what}" in line)


def start(folder: Path, *causes: str) -> Job:
    script = folder / "train.py"
    script.write_text(PROGRAM)
    return Job(2, script, ",".join(causes), str(folder / "checkpoints"), env={"DISTCONV_TIMEOUT_S": "6"})


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Jobs that end by themselves, by their cause, with their folders; all at once, as they wait more than compute."""
    folders = {cause: tmp_path_factory.mktemp(cause) for cause in ("save", "layers")}
    with ExitStack() as stack:
        jobs = {cause: stack.enter_context(start(folder, cause)) for cause, folder in folders.items()}
        first_grid = stack.enter_context(Job(2, NO_GRID, env={"DISTCONV_TIMEOUT_S": "6"}))
        found = {cause: (job.wait(LIMIT_S), folders[cause]) for cause, job in jobs.items()}
        return found | {"no grid": (first_grid.wait(LIMIT_S), Path())}


def reports(text: str) -> list[str]:
    """The reports that a job has printed, each from its headline to its last line."""
    return re.findall(r"^distconv: rank \d+ has waited .*\n(?:    .*\n)+", text, re.M)


def check_report(report: str, folder: Path, cause: str, call: str) -> None:
    """The report names rank 0, which is in ``call``, with the line of ``cause``, and rank 1 with its line."""
    headline = report.splitlines()[0]
    assert re.match(r"distconv: rank [01] has waited \d+ s in ", headline), report
    assert f"rank 0 in {call}" in headline and f"{folder}/train.py, line {line_of(cause)}" in report, report
    assert f"    rank 0 in {call}" in report and "    rank 1 in " in report
    if cause not in ("save", "layers"):
        assert re.search(r"^    rank 1 in .*, waiting \d+ s in agreement on forward pass of Net$", report, re.M), report
        assert f"train.py, line {line_of('layers')}: loss = model(image).square().mean()" in report


@pytest.mark.fault(113)
@pytest.mark.parametrize(("cause", "call"), [("save", "save_checkpoint"), ("layers", "sum of Net")])
def test_a_rank_that_makes_another_call_is_named_with_its_line_and_the_job_ends(ended, cause, call):
    ended, folder = ended[cause]
    assert ended.returncode == watchdog.ABORT_CODE, ended.stderr
    first, last = reports(ended.stderr)[0], reports(ended.stderr)[-1]
    check_report(first, folder, cause, call)
    assert "(the job ends when a rank has waited DISTCONV_TIMEOUT_S=6 seconds)" in first
    assert "rank 0 in" in last
    for rank in (0, 1):
        assert ended.stderr.count(f"distconv: stacks of rank {rank}\n") == 1


@pytest.mark.fault(113)
def test_a_rank_that_was_only_slow_is_named_with_its_line_and_the_training_goes_on(tmp_path):
    """Each cause lasts until it is reported, once."""
    causes = ("loop", "sleep")
    with start(tmp_path, *causes) as job:
        for count in range(1, len(causes) + 1):
            until = time.monotonic() + LIMIT_S
            while len(reports(job.output())) < count:
                assert job.process.poll() is None and time.monotonic() < until, job.output()
                time.sleep(0.1)
            os.kill(job.ranks()[0], signal.SIGUSR1)
        ended = job.wait(LIMIT_S)
    assert (ended.returncode, ended.stdout.count("finished")) == (0, 2), ended.stderr
    for report, cause in zip(reports(ended.stderr), causes, strict=True):
        check_report(report, tmp_path, cause, "user code")


def test_a_first_grid_that_other_ranks_do_not_make_is_reported(ended):
    ended, _ = ended["no grid"]
    assert ended.returncode == watchdog.ABORT_CODE, ended.stderr
    first = ended.stderr.partition("ending the job")[0]
    assert re.search(r"rank 0 has waited \d+ s in the start of distconv on 2 ranks, for", first)
    assert "line 8" in first and "they have made no grid with it" in first


def waits(line: int) -> RankState:
    return RankState(Position("conv2d", (("train.py", line),)), "halo exchange", 30.0)


def runs(line: int) -> RankState:
    return RankState(Position("", (("train.py", line),)))


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([waits(7), waits(7)], "all ranks wait in the same call"),
        ([runs(9), waits(7), waits(7)], "elsewhere: rank 0 in user code at train.py, line 9"),
        ([waits(9), waits(7), waits(7)], "elsewhere: rank 0 in conv2d at train.py, line 9"),
        ([None, waits(7), waits(9)], "elsewhere: rank 0 (no answer)"),
        ([RankState(Position(), has_left=True), waits(7)], "elsewhere: rank 0 in the end of its program"),
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
        groups.setdefault(state and state.location, []).append(rank)
    assert _describe_other_ranks(groups, dict(enumerate(states))) == text


@pytest.mark.parametrize(("size", "line"), [(2, None), (3, "    1 more rank of the job"), (5, "    3 more ranks of")])
def test_a_report_counts_the_ranks_without_a_grid_if_there_are_any(monkeypatch, size, line):
    world = SimpleNamespace(rank=1, size=size)
    monkeypatch.setattr(stuck_ranks, "MPI", SimpleNamespace(COMM_WORLD=world))
    report = stuck_ranks.format_report({0: runs(9), 1: waits(7)}, "the end").splitlines()
    assert report[0].startswith("distconv: rank 1 has waited 30 s in halo exchange; elsewhere: rank 0 in user code")
    assert report[-1] == "the end"
    assert [text for text in report if "made no grid" in text] == ([] if line is None else [report[-2]])
    assert line is None or report[-2].startswith(line)


def test_a_process_that_is_stopped_or_gone_is_told_from_one_that_waits(monkeypatch):
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setitem(stuck_ranks.node_processes, 7, process.pid)
    assert stuck_ranks.describe_dead_ranks() == ""
    for number, state in ((signal.SIGSTOP, "stopped"), (signal.SIGKILL, "gone")):
        process.send_signal(number)
        until = time.monotonic() + 20
        while stuck_ranks.describe_dead_ranks() != f"rank 7 (process {process.pid}) is {state}; ":
            assert time.monotonic() < until
            time.sleep(0.01)
    process.wait()
    assert "is gone" in stuck_ranks.describe_dead_ranks()
