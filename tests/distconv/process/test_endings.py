"""How ranks end: together without a word, or the job ends within seconds and says which rank left or failed."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.process import endings
from tests.harness.launch import Job

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(180)]

LIMIT_S = 120.0

# Rank 1 comes to an end while rank 0 does something else.
PROGRAM = """
import os, sys, threading, time
import torch
from mpi4py import MPI
import distconv as dc
MPI.COMM_WORLD.Barrier()
grid = dc.ProcessGrid(MPI.COMM_WORLD, n=MPI.COMM_WORLD.size)
x = dc.scatter(torch.ones(4, 3), grid)
total = x.sum()
def foreign(*raised):
    print("another excepthook")
def fail():
    raise ValueError("in a thread")
MPI.COMM_WORLD.Barrier()
if grid.rank == 1:
    {leave}
elif grid.rank == 0:
    {stay}
"""
IN_OURS, IN_MPI = "x.max()", "MPI.COMM_WORLD.recv(source=1)"

LEFT = "rank 1 has come to the end of its program, but rank 0 waits in agreement on extremes at <string>, line "
FALLS_OFF = ("pass", 75)
HOOKED = ("sys.excepthook = foreign; 1 / 0", 1)
IN_THREAD = ("threading.Thread(target=fail).start(); time.sleep(60)", 1)
OWN_HOOK = "rank 1 failed, and its own sys.excepthook has taken the exception; ending the job"

QUICK = {
    "falls off": (FALLS_OFF, IN_OURS, LEFT),
    "another excepthook": (HOOKED, IN_MPI, OWN_HOOK),
    "in a thread": (IN_THREAD, IN_OURS, "ValueError: in a thread"),
}


def told(case, ended) -> None:
    """The exit code and the words of ``case``."""
    (_, code), _, text = case
    assert ended.returncode == code, ended.stderr
    assert text in ended.stderr


@pytest.mark.slow
@pytest.mark.fault(101)
@pytest.mark.parametrize(("leave", "code"), [("pass", 0), ("sys.exit(3)", 3)])
def test_a_rank_that_still_computes_may_finish(leave, code):
    """For longer than the timeout: it is found at another place each time."""
    busy = "[time.sleep(0.3) or time.sleep(0.3) or time.sleep(0.3) for _ in range(10)]; print('computed')"
    with Job(2, PROGRAM.format(leave=leave, stay=busy), env={"DISTCONV_TIMEOUT_S": "5"}) as job:
        ended = job.wait(LIMIT_S)
    assert ended.returncode == code
    assert "computed" in ended.stdout
    assert "distconv:" not in ended.stderr


PEACEFUL = """
import os, sys
import distconv
from mpi4py import MPI
distconv.ProcessGrid(MPI.COMM_WORLD, n=2)
child = os.fork()
if not child:
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
if MPI.COMM_WORLD.rank == 0:
    try:
        sys.exit(3)
    except SystemExit as left:
        print("caught", left.code, flush=True)
sys.exit(4)
"""
ALL_FAIL = """
import torch
from mpi4py import MPI
import distconv as dc
def train():
    dc.scatter(torch.ones(2, 3, 8, 8), dc.ProcessGrid(MPI.COMM_WORLD, n=2), dims={dims})
train()
"""
# MPI is initialized after distconv was imported; the hook is set before the first grid.
LATE = """
import mpi4py
mpi4py.rc.initialize = False
import os, sys
import distconv as dc
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_MULTIPLE)
os.environ["DISTCONV_FALLBACK"] = "error" if MPI.COMM_WORLD.rank else "warn"
try:
    dc.ProcessGrid(MPI.COMM_WORLD, n=2)
except dc.EnvironmentVariableError as error:
    print(error, flush=True)
del os.environ["DISTCONV_FALLBACK"]
sys.excepthook = lambda kind, value, trace: print("the user's hook:", value, file=sys.stderr)
dc.ProcessGrid(MPI.COMM_WORLD, n=2)
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("only here")
MPI.COMM_WORLD.Barrier()
"""
PROGRAMS = {
    "peaceful": PEACEFUL,
    "all fail": ALL_FAIL.format(dims="'nc'"),
    "each fails": ALL_FAIL.format(dims="1 / 0 if MPI.COMM_WORLD.rank else MPI.nothing"),
    "late": LATE,
    **{name: PROGRAM.format(leave=end[0], stay=stay) for name, (end, stay, _) in QUICK.items()},
}


@pytest.fixture(scope="module")
def ended():
    """All of them at once: they wait more than they compute."""
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(Job(2, code)) for name, code in PROGRAMS.items()}
        yield {name: job.wait(LIMIT_S) for name, job in jobs.items()}


@pytest.mark.fault(45, 101)
@pytest.mark.parametrize("name", QUICK)
def test_an_end_of_one_rank_ends_the_job_and_is_told(ended, name):
    told(QUICK[name], ended[name])


@pytest.mark.fault(45, 103, 106)
def test_ranks_are_looked_after_where_mpi_begins_after_the_import_and_an_earlier_hook_prints(ended):
    """The first grid compares variables, too."""
    end = ended["late"]
    assert end.returncode == 1, end.stderr
    assert end.stdout.count("DISTCONV_FALLBACK differs between ranks: warn on rank 0, error on rank 1") == 2
    assert "distconv: rank 1 failed\nthe user's hook: only here\n" in end.stderr and "Traceback" not in end.stderr


@pytest.mark.fault(46)
def test_all_ranks_may_exit_with_a_code_and_neither_a_caught_exit_nor_that_of_a_forked_child_ends_anything(ended):
    end = ended["peaceful"]
    assert (end.returncode, end.stdout) == (4, "caught 3\n"), end.stderr
    assert "distconv:" not in end.stderr


@pytest.mark.fault(102)
def test_what_all_ranks_raise_is_printed_once_without_our_lines(ended):
    end = ended["all fail"]
    assert end.returncode == 1
    assert end.stderr.count("Traceback") == 1
    assert end.stderr.count("DistributionError: ") == 1
    assert "distconv: rank 0 failed\n" in end.stderr
    assert "train()" in end.stderr or ", in train" in end.stderr
    assert "placement.py" not in end.stderr


@pytest.mark.fault(102)
def test_our_lines_are_shown_if_asked_for(monkeypatch):
    grid = dc.ProcessGrid(MPI.COMM_SELF, n=1)
    with pytest.raises(dc.DistributionError) as caught:
        dc.scatter(torch.ones(2, 3, 8, 8), grid, dims="nc")
    for shown in (False, True):
        monkeypatch.setenv("DISTCONV_TRACEBACK", "full" if shown else "")
        text = endings._format_traceback(caught.type, caught.value, caught.tb)
        assert "test_endings.py" in text and ("placement.py" in text) is shown


@pytest.mark.fault(45, 102)
def test_what_ranks_raise_differently_is_printed_by_each(ended):
    assert "distconv: rank 0 failed\nTraceback" in ended["each fails"].stderr
    assert "distconv: rank 1 failed\nTraceback" in ended["each fails"].stderr
    assert "AttributeError" in ended["each fails"].stderr
    assert "ZeroDivisionError" in ended["each fails"].stderr


def test_the_chain_of_an_error_that_is_not_ours_stays():
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer")  # noqa: B904
    except ValueError as error:
        text = endings._format_traceback(type(error), error, error.__traceback__)
    assert "KeyError: 'inner'" in text
    assert "ValueError: outer" in text
