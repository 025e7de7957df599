"""Bad input that must never hang, crash or pass in silence. Shapes and geometry are with the layers."""

from __future__ import annotations

import time

import pytest
import torch

import distconv as dc
from distconv.process import watchdog
from tests.distconv.layouts import grid_over, raises_everywhere
from tests.harness.launch import Job


@pytest.mark.fault(18)
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_device_type_on_one_rank_is_a_mismatch(comm, device):
    grid = grid_over(comm, h=comm.size)
    tensor = torch.zeros(2, 2, 6, 6, device=device if comm.rank else "cpu")
    raises_everywhere(comm, dc.MismatchError, device, lambda: dc.scatter(tensor, grid))


WITHOUT_MPI = """
import mpi4py
mpi4py.rc.initialize = False
import torch
import distconv as dc
from mpi4py import MPI
from distconv.process import watchdog
def attempt(name, call):
    try:
        call()
    except RuntimeError as error:
        print(name, "told:", error)
attempt("before", lambda: dc.ProcessGrid(MPI.COMM_WORLD, n=1))
MPI.Init_thread(MPI.THREAD_MULTIPLE)
grid = dc.ProcessGrid(MPI.COMM_WORLD, n=MPI.COMM_WORLD.size)
x = dc.scatter(torch.ones(4, 3), grid)
x.gather()
assert not watchdog._stopped.is_set()
MPI.Finalize()
assert watchdog._stopped.is_set() is (grid.size > 1)
attempt("grid", lambda: dc.ProcessGrid(MPI.COMM_WORLD, n=1))
attempt("scatter", lambda: dc.scatter(torch.ones(5, 3), grid))
attempt("gather", lambda: x.gather())
attempt("sum", lambda: x.sum())
attempt("loss", lambda: x.mean().item())
attempt("parallelize", lambda: dc.parallelize(torch.nn.Linear(2, 2), grid))
"""

# The timeout does not count imports, which may take longer on one rank: they end in a barrier of MPI.
# Rank 0 gathers weights, which lie on another grid than what rank 1 calls meanwhile.
ALONE = """
from mpi4py import MPI
import torch
import distconv as dc
MPI.COMM_WORLD.Barrier()
grid = dc.ProcessGrid(MPI.COMM_WORLD, c=2)
torch.manual_seed(0)
model = dc.parallelize(torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1)), grid)
x = dc.scatter(torch.ones(2, 4, 6, 6), grid)
model(x)
if MPI.COMM_WORLD.rank == 0:
    saved = model.state_dict()
model(x)
"""


@pytest.fixture(scope="module")
def jobs():
    """Both at once: they wait more than they compute."""
    with Job(2, WITHOUT_MPI) as without_mpi, Job(2, ALONE, env={"DISTCONV_TIMEOUT_S": "6"}) as alone:
        yield {"without MPI": without_mpi, "alone": alone}


@pytest.mark.fault(28)
@pytest.mark.mpi
def test_before_mpi_begins_and_after_it_ends_it_says_so_and_does_not_crash(jobs):
    """Nor is a message looked for once MPI ends."""
    ended = jobs["without MPI"].wait(120)
    assert ended.returncode == 0, ended.stderr
    for name in ("before", "grid", "scatter", "gather", "sum", "loss", "parallelize"):
        assert f"{name} told: " in ended.stdout, ended.stdout
    assert "finalized" in ended.stdout


@pytest.mark.mpi
def test_a_call_that_one_rank_alone_makes_is_named_with_its_line_on_both(jobs):
    ended = jobs["alone"].wait(120)
    assert ended.returncode == 75, ended.stderr
    assert "DISTCONV_CHECK=all reports at once" in ended.stderr
    assert "(<string>, line 12): '0' (Conv2d)\n" in ended.stderr.partition("rank 0 of 2 has waited")[2]
    assert "(<string>, line 13): Sequential\n" in ended.stderr.partition("rank 1 of 2 has waited")[2]


def test_the_end_of_an_inner_wait_leaves_the_outer_one_with_its_time():
    def told():
        return [describe() for _, _, describe in watchdog.current_waits()]

    assert told() == []
    with watchdog.waiting(lambda: "outer"):
        began = time.monotonic()
        with watchdog.waiting(lambda: "inner"):
            assert told() == ["inner"]
        ((_, since, describe),) = watchdog.current_waits()
        assert describe() == "outer" and since <= began
    assert told() == []
