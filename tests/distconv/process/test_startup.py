"""What a process does when distconv is imported, or with the first grid where MPI begins later."""

from __future__ import annotations

import pytest

from distconv.process.startup import threads_for


@pytest.mark.parametrize(
    ("mine", "everyone", "threads"),
    [
        ({0, 1, 2, 3}, [{0, 1, 2, 3}], 4),
        ({0, 1, 2, 3}, [{0, 1, 2, 3}] * 3, 1),
        ({0, 1, 2, 3, 4}, [{0, 1, 2, 3, 4}] * 2, 2),
        ({4, 5, 6}, [{0, 1, 2}, {4, 5, 6}], 3),
        ({0}, [{0}] * 8, 1),
    ],
)
def test_ranks_share_the_cores_that_they_may_use(mine, everyone, threads):
    assert threads_for(frozenset(mine), [frozenset(cores) for cores in everyone]) == threads


LATE = """
import mpi4py
mpi4py.rc.initialize = False
import os, sys
hook = sys.excepthook
import distconv as dc
from mpi4py import MPI
assert sys.excepthook is hook
MPI.Init_thread(MPI.THREAD_MULTIPLE)
os.environ["DISTCONV_FALLBACK"] = "error" if MPI.COMM_WORLD.rank else "warn"
try:
    dc.ProcessGrid(MPI.COMM_WORLD, n=2)
except dc.EnvironmentVariableError as error:
    print(error)
del os.environ["DISTCONV_FALLBACK"]
dc.ProcessGrid(MPI.COMM_WORLD, n=2)
assert sys.excepthook is not hook
MPI.Finalize()
"""


@pytest.mark.fault(103, 106)
def test_where_mpi_begins_later_the_first_grid_does_what_the_import_does(mpiexec):
    ended = mpiexec(2, LATE, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("DISTCONV_FALLBACK differs between ranks: warn on rank 0, error on rank 1") == 2
