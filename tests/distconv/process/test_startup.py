"""The start of distconv at the first grid: on the ranks of its communicator; other ranks may not even import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distconv.process.startup import thread_count
from tests.harness import launch

ROOT = Path(__file__).resolve().parents[3]


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
    assert thread_count(frozenset(mine), [frozenset(cores) for cores in everyone]) == threads


IMPORT = """
import atexit, os, signal, sys, threading, warnings
from mpi4py import MPI
import torch
import torch.export, torch.nn.attention.flex_attention, torch.utils.checkpoint, torch.distributed.tensor
import torch.distributed.checkpoint, torch.nn.utils.parametrizations, torch.testing
import h5py  # registers its own end

def state():
    owners = [m for name, m in sorted(sys.modules.items()) if name.split(".")[0] == "torch" and name in before]
    classes = [c for m in owners for c in vars(m).values() if isinstance(c, type) and c.__module__.startswith("torch")]
    attributes = {
        (getattr(owner, "__module__", ""), owner.__name__, name): id(value)
        for owner in (*owners, *classes, sys, os, threading)
        for name, value in list(vars(owner).items())
        if not name.startswith("__") or name in ("__call__", "__torch_dispatch__", "__setattr__")
    }
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    counts = torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count(), atexit._ncallbacks()
    return {
        "attributes": attributes,
        "environment": dict(os.environ),
        "counts": counts,
        "handlers": handlers,
        "filters": list(warnings.filters),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "multithreading": torch._C._is_multithreading_enabled(),
        "paths": (sys.path[:], sys.argv[:], sys.meta_path[:], sys.path_hooks[:]),
    }

before = set(sys.modules)
runs = []
sys.addaudithook(lambda event, _: runs.append(event) if event in ("os.exec", "os.fork", "subprocess.Popen") else None)
torch.autograd.backward = lambda *args, **kwargs: runs.append("backward")
first = state()
import distconv
second = state()
for name in first:
    if isinstance(first[name], dict):
        changed = [key for key in first[name] if first[name][key] != second[name].get(key)]
        assert not changed, (name, changed[:20])
    else:
        assert first[name] == second[name], (name, first[name], second[name])
assert not runs, runs
print("imported", flush=True)
"""
ALONE = """
from mpi4py import MPI
calls = []
class Counted(MPI.Intracomm):
    def __getattribute__(self, name):
        calls.append(name)
        return super().__getattribute__(name)
world, own = MPI.COMM_WORLD, MPI.COMM_SELF
if world.rank == 1:
    MPI.COMM_WORLD, MPI.COMM_SELF = Counted(world), Counted(own)
    import distconv as dc, distconv.pipeline, distconv.cli
    assert set(calls) <= {"rank", "size"}, calls
    MPI.COMM_WORLD, MPI.COMM_SELF = world, own
    print(dc.block_range(7, 2, 0), dc.ProcessGrid(own, n=1))
world.Barrier()
"""

SOLVER = """
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Split(0, world.rank)
for step in range(3):
    world.send(step, dest=1)
print("solver received", world.recv(source=1), flush=True)
world.send("printed", dest=2)
world.recv(source=1)  # waits until the job ends
"""

TRAIN = """
from mpi4py import MPI
import torch
import distconv as dc
from distconv import local_device
world = MPI.COMM_WORLD
ranks = world.Split(1, world.rank)
grid = dc.ProcessGrid(ranks, h=ranks.size)
torch.manual_seed(0)
model = dc.parallelize(torch.nn.Conv2d(2, 3, 3, padding=1).double(), grid)
alone = torch.nn.Conv2d(2, 3, 3, padding=1).double()
alone.load_state_dict(model.state_dict())
x = torch.randn(2, 2, 7, 5, dtype=torch.float64)
for _ in range(3):
    step = ranks.bcast(world.recv(source=0) if ranks.rank == 0 else None)
    loss = model(dc.scatter(x * step, grid)).square().mean()
dc.save_checkpoint("checkpoints", 3, model)
with torch.no_grad():
    model.weight.zero_()
assert dc.load_checkpoint("checkpoints", model).step == 3
loss = model(dc.scatter(x * step, grid)).square().mean()
torch.testing.assert_close(loss.item(), alone(x * 2).square().mean().item(), rtol=1e-12, atol=0)
if ranks.rank == 0:
    world.send("the loss", dest=0)
    assert local_device._local_rank is not None
world.recv(source=0)  # on rank 1 until the job ends
raise ValueError("only here")
"""


OVERLAPPING = """
import sys
from mpi4py import MPI
import distconv as dc
world = MPI.COMM_WORLD
pairs = [world.Create_group(world.group.Incl(ranks)) if world.rank in ranks else None for ranks in ([0, 1], [1, 2])]
for pair in filter(None, pairs):
    dc.ProcessGrid(pair, n=2)
dc.ProcessGrid(world, n=3)
if world.rank == 1:
    raise ValueError("only here")
world.Barrier()
"""


@pytest.mark.fault(111)
def test_importing_only_defines_things(mpiexec):
    ended = mpiexec(2, IMPORT, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "imported\n" * 2), ended.stderr


@pytest.mark.fault(111)
def test_one_rank_alone_may_import_distconv_which_sends_no_message_and_make_a_grid_of_itself(mpiexec):
    ended = mpiexec(2, ALONE, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("range(0, 4) ")


@pytest.mark.fault(111)
@pytest.mark.mpi
def test_some_ranks_of_a_job_train_while_others_run_another_program(tmp_path):
    """A solver that never imports distconv on one rank, and a training on two, whose failure ends the solver, too."""
    (tmp_path / "solver.py").write_text(SOLVER)
    (tmp_path / "train.py").write_text(TRAIN)
    python = [sys.executable]
    command = [*launch.mpiexec_command(), "-n", "1", *python, "solver.py", ":", "-n", "2", *python, "train.py"]
    environment = {**launch._clean_environment(), **launch.ON_RANKS, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "solver received the loss\n"), ended.stderr
    assert "distconv: rank 2 failed\nTraceback" in ended.stderr and "ValueError: only here" in ended.stderr


def test_grids_over_overlapping_communicators_coordinate_the_exits_of_all_their_ranks(mpiexec):
    ended = mpiexec(3, OVERLAPPING, timeout=60)
    assert ended.returncode == 1, ended.stderr
    assert "distconv: rank 1 failed" in ended.stderr
    assert ended.stderr.count("Traceback") == 1


WORKERS = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import distconv as dc
import torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        from mpi4py import MPI

        assert not MPI.Is_initialized()
        return torch.full((2, 7, 4), float(index), dtype=torch.float64)

def grid(index):
    dc.ProcessGrid(n=1)

if __name__ == "__main__":
    from mpi4py import MPI

    ranks = dc.ProcessGrid(h=MPI.COMM_WORLD.size)
    if sys.argv[1] == "loader":
        batches = torch.utils.data.DataLoader(Samples(), 2, num_workers=1, multiprocessing_context="spawn")
        print([dc.scatter(batch, ranks).sum().item() for batch in batches])
    else:
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
            try:
                list(pool.map(grid, range(4)))
            except dc.CommunicatorError as error:
                print(error)
"""


@pytest.mark.fault(112)
@pytest.mark.mpi
@pytest.mark.time_limit(180)
@pytest.mark.parametrize(("what", "ranks"), [("loader", 2), ("grid", 1)])
def test_worker_processes_start_no_mpi_and_make_no_grid(tmp_path, mpiexec, what, ranks):
    script = tmp_path / "train.py"
    script.write_text(WORKERS)
    ended = mpiexec(ranks, script, what, timeout=150, env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    if what == "loader":
        assert ended.stdout == "[56.0, 280.0]\n" * 2
    else:
        assert "is a worker process, not a rank" in ended.stdout
        assert 'below if __name__ == "__main__":' in ended.stdout
