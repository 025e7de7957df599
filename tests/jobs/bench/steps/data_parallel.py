"""A step of ResNet-50 on all ranks along n, eagerly and captured, beside torch's own data parallelism in the same run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python -m mpi4py -m tests.jobs.bench.steps.data_parallel 64

First the height and width of 8 samples, then perhaps the number of turns. DistributedDataParallel goes by gloo, with
and without gradients as views of its buckets, and with and without a static graph; batch norm is each rank's own there,
without a message. Here it is global; with ``local`` statistics it has none, either. Forward and backward, gradients
summed; all take turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import distconv as dc
from distconv.layers.models import resnet50

BATCH, WARM = 8, 2

Step = Callable[[], object]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return resnet50()


def _data_parallel(x: torch.Tensor, t: torch.Tensor, **options: bool) -> Step:
    model = DistributedDataParallel(_model(), **options)

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), t).backward()

    return step


def _distributed(x: torch.Tensor, t: torch.Tensor, grid: dc.ProcessGrid, statistics_of: str, captured: bool) -> Step:
    model = dc.parallelize(_model(), grid, batch_norm=statistics_of)

    def step(x: torch.Tensor, t: torch.Tensor) -> None:
        F.cross_entropy(model(x), t).backward()

    given = dc.scatter(x, grid), dc.scatter(t, grid, dims="n")
    taken = dc.capture(step, *given) if captured else step

    def with_zero() -> None:
        model.zero_grad()
        taken(*given)

    return with_zero


def main(size: int, turns: int = 11) -> None:
    """Measure and print, on rank 0."""
    torch.set_num_threads(1)
    world, grid = MPI.COMM_WORLD, dc.ProcessGrid(n=MPI.COMM_WORLD.size)
    file = world.bcast(tempfile.mkstemp(prefix="distconv-")[1])
    dist.init_process_group("gloo", f"file://{file}", rank=world.rank, world_size=world.size)
    torch.manual_seed(0)
    x, t = torch.randn(BATCH, 3, size, size), torch.randint(1000, (BATCH,))
    mine = slice(world.rank * BATCH // world.size, (world.rank + 1) * BATCH // world.size)
    steps = {
        f"DDP{', bucket views' * views}{', static graph' * static}": _data_parallel(
            x[mine], t[mine], gradient_as_bucket_view=views, static_graph=static
        )
        for views in (False, True)
        for static in (False, True)
    }
    for over in ("global", "local"):
        for captured in (False, True):
            name = f"distconv, {over} statistics, {'captured' if captured else 'eager'}"
            steps[name] = _distributed(x, t, grid, over, captured)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + WARM):
        for name, step in steps.items():
            world.Barrier()
            began = time.perf_counter()
            step()
            world.Barrier()
            if turn >= WARM:
                times[name].append((time.perf_counter() - began) * 1e3)
    if world.rank == 0:
        best = min(statistics.median(found) for name, found in times.items() if name.startswith("DDP"))
        print(
            f"ResNet-50, {BATCH} x 3 x {size} x {size}, {world.size} ranks: ms, median (min to max), over the best DDP"
        )
        for name, found in times.items():
            median = statistics.median(found)
            print(f"{name:<46}{median:8.0f} ({min(found):.0f} to {max(found):.0f}) {median / best:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
