"""Compare a step of ResNet-50 over samples, eager and captured, with DistributedDataParallel, in both memory formats.

    OMP_NUM_THREADS=1 mpiexec -n 2 distconv run -m tests.jobs.bench.steps.data_parallel 64

The arguments are the height and width of the 8 samples, and optionally the number of rounds. All variants run
interleaved: forward, backward, and the sum of the gradients. DistributedDataParallel (DDP) uses gloo, and batch norm
the statistics of each rank. distconv is measured with global statistics and with those of each rank ("local").
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import distconv as dc
from distconv.jobs.timing import time_interleaved, timed_variants
from distconv.layers.models import resnet50
from distconv.memory_format import FORMATS, named_format

BATCH, WARM = 8, 2

Step = Callable[[], object]


def _model(memory_format: torch.memory_format) -> torch.nn.Module:
    torch.manual_seed(0)
    return resnet50().to(memory_format=memory_format)  # type: ignore[call-overload]


def _data_parallel(x: torch.Tensor, t: torch.Tensor, memory_format: torch.memory_format, **options: bool) -> Step:
    model = DistributedDataParallel(_model(memory_format), **options)
    x = x.contiguous(memory_format=memory_format)

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), t).backward()

    return step


def _distributed(
    x: torch.Tensor,
    t: torch.Tensor,
    memory_format: torch.memory_format,
    grid: dc.ProcessGrid,
    scope: str,
    *,
    captured: bool,
) -> Step:
    model = dc.parallelize(_model(memory_format), grid, batch_norm=scope)

    def step(x: torch.Tensor, t: torch.Tensor) -> None:
        F.cross_entropy(model(x), t).backward()

    batch = dc.scatter(x.contiguous(memory_format=memory_format), grid), dc.scatter(t, grid, dims="n")
    act = dc.capture(step, *batch) if captured else step

    def with_zero() -> None:
        model.zero_grad()
        act(*batch)

    return with_zero


def main(size: int, rounds: int = 11) -> None:
    """Measure and print, on rank 0."""
    torch.set_num_threads(1)
    world, grid = MPI.COMM_WORLD, dc.ProcessGrid(n=MPI.COMM_WORLD.size)
    file = world.bcast(tempfile.mkstemp(prefix="distconv-")[1])
    dist.init_process_group("gloo", f"file://{file}", rank=world.rank, world_size=world.size)
    torch.manual_seed(0)
    x, t = torch.randn(BATCH, 3, size, size), torch.randint(1000, (BATCH,))
    own = slice(world.rank * BATCH // world.size, (world.rank + 1) * BATCH // world.size)
    steps = {}
    for name in FORMATS:
        order = named_format(name, x.dim())
        for tuned in (False, True):
            options = {"gradient_as_bucket_view": tuned, "static_graph": tuned}
            what = f"DDP{', bucket views, static graph' * tuned}, {name}"
            steps[what] = _data_parallel(x[own], t[own], order, **options)
        for scope in ("global", "local"):
            for captured in (False, True):
                what = f"distconv, {scope} statistics, {'captured' if captured else 'eager'}, {name}"
                steps[what] = _distributed(x, t, order, grid, scope, captured=captured)
    times = time_interleaved(world, timed_variants(steps), rounds, warm_up=WARM)
    if world.rank == 0:
        fastest = min(
            (name for name in times if name.startswith("DDP")), key=lambda name: statistics.median(times[name])
        )
        print(f"ResNet-50, {BATCH} x 3 x {size} x {size}, {world.size} ranks; fastest DDP: {fastest}")
        print(f"{'':<54}{'ms: median (min to max)':>26}  ratio to the fastest DDP: median (min to max)")
        for name, values in times.items():
            ratios = [a / b for a, b in zip(values, times[fastest], strict=True)]
            figures = (
                f"{statistics.median(v):.{d}f} ({min(v):.{d}f} to {max(v):.{d}f})"
                for v, d in (([1e3 * value for value in values], 0), (ratios, 2))
            )
            print(f"{name:<54}{next(figures):>26}  {next(figures)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
