"""How ranks end: together without a word, or the job ends within seconds and says which rank left or failed."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from distconv.process import endings
from tests.harness.launch import Job

pytestmark = pytest.mark.mpi

LIMIT_S = 120.0

# Rank 1 comes to an end while rank 0 does something else.
PROGRAM = """
import ctypes, os, sys, time
import torch
from mpi4py import MPI
import distconv as dc
from distconv.process import endings
grid = dc.ProcessGrid(MPI.COMM_WORLD, n=MPI.COMM_WORLD.size)
x = dc.scatter(torch.ones(4, 3), grid)
total = x.sum()
class Worker:
    comm = MPI.COMM_WORLD
    def work(self):
        return str(self.comm.recv(source=1))
def foreign(*raised):
    print("another excepthook")
MPI.COMM_WORLD.Barrier()
if grid.rank == 1:
    print("left at", time.time(), flush=True)
    {leave}
elif grid.rank == 0:
    {stay}
"""
IN_OURS, IN_MPI, BUSY = "x.max()", "Worker().work()", "time.sleep(7); print('computed')"

FALLS_OFF = ("pass", 75, "rank 1 has left, at the end of its program, but rank 0 waits in {}")
RAISES_EXIT = ("raise SystemExit(3)", 75, FALLS_OFF[2])
QUITS = ("quit()", 75, FALLS_OFF[2])
EXITS_0 = ("sys.exit(0)", 75, FALLS_OFF[2])
EXITS_3 = ("sys.exit(3)", 3, "rank 1 left with exit code 3 and the others did not")
AT_ONCE = ("os._exit(0)", 1, "rank 1 left with exit code 0 and the others did not")
EXECS = ("os.execlp('true', 'true')", 1, AT_ONCE[2])
C_EXITS = ("ctypes.CDLL(None).exit(0)", 1, AT_ONCE[2])
HOOKED = ("sys.excepthook = foreign; 1 / 0", 1, "rank 1 left with exit code 1 and the others did not")
RAISES = ("1 / 0", 1, "rank 1 failed\nTraceback")
FROM_OURS = "agreement on extremes, for "
FROM_MPI = "Intracomm.recv at "

QUICK = {
    "falls off": (FALLS_OFF, IN_OURS),
    "exit of C": (C_EXITS, IN_MPI),
    "another excepthook": (HOOKED, IN_OURS),
    "raises SystemExit": (RAISES_EXIT, IN_MPI),
}
SLOW = [
    *((end, stay) for end in (QUITS, EXITS_0, EXITS_3, AT_ONCE, EXECS, RAISES) for stay in (IN_OURS, IN_MPI)),
    *((end, BUSY) for end in (EXITS_3, AT_ONCE, EXECS, C_EXITS, HOOKED, RAISES)),
    *((end, IN_MPI) for end in (FALLS_OFF, HOOKED)),
]


def told(case, ended) -> None:
    """The exit code and the words of ``case``."""
    (_, code, text), stay = case
    assert ended.returncode == code, ended.stderr
    assert text.format(FROM_OURS if stay == IN_OURS else FROM_MPI) in ended.stderr


@pytest.mark.slow
@pytest.mark.fault(45, 46, 47, 101)
@pytest.mark.parametrize(("end", "stay"), SLOW)
def test_an_end_of_one_rank_ends_the_job_within_seconds(end, stay):
    with Job(2, PROGRAM.format(leave=end[0], stay=stay)) as job:
        ended = job.wait(LIMIT_S)
    told((end, stay), ended)
    assert time.time() - float(ended.stdout.partition("left at ")[2].split()[0]) < 5.5  # with the launcher's own end


@pytest.mark.slow
@pytest.mark.fault(101)
@pytest.mark.parametrize(("leave", "code"), [("pass", 0), ("sys.exit()", 0), ("raise SystemExit(3)", 3)])
def test_a_rank_that_still_computes_may_finish(leave, code):
    with Job(2, PROGRAM.format(leave=leave, stay=BUSY)) as job:
        ended = job.wait(LIMIT_S)
    assert ended.returncode == code
    assert "computed" in ended.stdout
    assert "distconv:" not in ended.stderr


SLOW_PARTNER = """
import time
from mpi4py import MPI
import distconv
comm = MPI.COMM_WORLD
distconv.ProcessGrid(comm, n=3)
comm.Barrier()
if comm.rank == 2:
    time.sleep(6)
found = comm.gather(comm.rank, root=0)
if comm.rank == 0:
    print(found)
    comm.recv(source=1)
"""


@pytest.mark.slow
@pytest.mark.fault(101)
def test_who_waits_for_a_rank_that_computes_is_left_alone():
    """Rank 1 has left and rank 0 waits, but for rank 2; only then for rank 1."""
    with Job(3, SLOW_PARTNER) as job:
        ended = job.wait(LIMIT_S)
    assert ended.stdout == "[0, 1, 2]\n"
    assert ended.returncode == 75
    assert "has left, at the end of its program, but rank 0 waits in Intracomm.recv" in ended.stderr


CAUGHT = """
import sys
import distconv
from mpi4py import MPI
distconv.ProcessGrid(MPI.COMM_WORLD, n=2)
if MPI.COMM_WORLD.rank == 0:
    try:
        sys.exit(3)
    except SystemExit as left:
        print("caught", left.code)
"""
# A child of a data loader leaves like that, too.
ALL_AT_ONCE = """
import os
import distconv
from mpi4py import MPI
distconv.ProcessGrid(MPI.COMM_WORLD, n=2)
child = os.fork()
if not child:
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
print("done", flush=True)
os._exit(0)
"""
ALL_EXIT = "import sys, distconv; distconv.ProcessGrid(n=2); sys.exit(4)"
ALL_FAIL = """
import torch
from mpi4py import MPI
import distconv as dc
def train():
    dc.scatter(torch.ones(2, 3, 8, 8), dc.ProcessGrid(MPI.COMM_WORLD, n=2), dims={dims})
train()
"""
# MPI is initialized after distconv was imported.
LATE = """
import mpi4py
mpi4py.rc.initialize = False
import distconv as dc
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_MULTIPLE)
grid = dc.ProcessGrid(MPI.COMM_WORLD, n=2)
if grid.rank == 1:
    raise ValueError("only here")
MPI.COMM_WORLD.Barrier()
"""
HOOKED_BEFORE = """
import sys
from mpi4py import MPI
import distconv
sys.excepthook = lambda kind, value, trace: print("the user's hook:", value, file=sys.stderr)
distconv.ProcessGrid(MPI.COMM_WORLD, n=2)
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("only here")
MPI.COMM_WORLD.Barrier()
"""
FINALIZED = """
import distconv
from mpi4py import MPI
from distconv.process import watchdog
distconv.ProcessGrid(MPI.COMM_WORLD, n=2)
before = watchdog._stopped.is_set()
MPI.Finalize()
print(before, watchdog._stopped.is_set())
"""
PROGRAMS = {
    "finalized": FINALIZED,
    "hooked before": HOOKED_BEFORE,
    "caught": CAUGHT,
    "all at once": ALL_AT_ONCE,
    "all exit": ALL_EXIT,
    "all fail": ALL_FAIL.format(dims="'nc'"),
    "all fail, in full": ALL_FAIL.format(dims="'nc'"),
    "each fails": ALL_FAIL.format(dims="1 / 0 if MPI.COMM_WORLD.rank else MPI.nothing"),
    "late": LATE,
    **{name: PROGRAM.format(leave=end[0], stay=stay) for name, (end, stay) in QUICK.items()},
}


@pytest.fixture(scope="module")
def ended():
    """All of them at once: they wait more than they compute."""
    with ExitStack() as stack:
        full = {"DISTCONV_TRACEBACK": "full"}
        jobs = {
            name: stack.enter_context(Job(2, code, env=full if "full" in name else None))
            for name, code in PROGRAMS.items()
        }
        yield {name: job.wait(LIMIT_S) for name, job in jobs.items()}


@pytest.mark.fault(45, 47, 101)
@pytest.mark.parametrize("name", QUICK)
def test_an_end_of_one_rank_ends_the_job_and_is_told(ended, name):
    told(QUICK[name], ended[name])


def test_a_hook_from_before_the_first_grid_prints_what_has_failed(ended):
    end = ended["hooked before"]
    assert end.returncode == 1, end.stderr
    assert "distconv: rank 1 failed\nthe user's hook: only here\n" in end.stderr and "Traceback" not in end.stderr


def test_no_message_is_looked_for_once_mpi_ends(ended):
    assert (ended["finalized"].returncode, ended["finalized"].stdout) == (0, "False True\n" * 2)


def test_an_exit_that_is_caught_ends_nothing(ended):
    end = ended["caught"]
    assert (end.returncode, end.stdout, end.stderr) == (0, "caught 3\n", "")


def test_children_and_ranks_that_all_leave_at_once_end_nothing(ended):
    assert ended["all at once"].stdout == "done\ndone\n"
    assert "distconv:" not in ended["all at once"].stderr


@pytest.mark.fault(46)
def test_all_ranks_may_exit_with_a_code(ended):
    assert ended["all exit"].returncode == 4
    assert "distconv:" not in ended["all exit"].stderr


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
def test_our_lines_are_shown_if_asked_for(ended):
    assert "placement.py" in ended["all fail, in full"].stderr


@pytest.mark.fault(45, 102)
def test_what_ranks_raise_differently_is_printed_by_each(ended):
    assert "distconv: rank 0 failed\nTraceback" in ended["each fails"].stderr
    assert "distconv: rank 1 failed\nTraceback" in ended["each fails"].stderr
    assert "AttributeError" in ended["each fails"].stderr
    assert "ZeroDivisionError" in ended["each fails"].stderr


@pytest.mark.fault(45, 106)
def test_ranks_are_looked_after_where_mpi_begins_after_the_import(ended):
    assert ended["late"].returncode == 1
    assert "rank 1 failed\nTraceback" in ended["late"].stderr
    assert "ValueError: only here" in ended["late"].stderr


def test_the_chain_of_an_error_that_is_not_ours_stays():
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer")  # noqa: B904
    except ValueError as error:
        text = endings._formatted(type(error), error, error.__traceback__)
    assert "KeyError: 'inner'" in text
    assert "ValueError: outer" in text
