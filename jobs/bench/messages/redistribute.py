"""Time the redistribution of a tensor between two grids of the ranks, and compare it with raw MPI.

"Alltoallv" packs the data for each rank, exchanges all of them with one call and unpacks them. "messages" does the same
with one message for each pair of ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from mpi4py import MPI

import distconv as dc
from distconv.communication.transfer import transfer_plan
from distconv.distribution import Distribution, default_axes
from distconv.jobs.bench import report
from distconv.jobs.bench.messages import WARM_UP
from distconv.jobs.bench.messages.raw_transfer import RawTransfer
from distconv.jobs.timing import medians, time_interleaved, timed_variants
from distconv.jobs.training.options import grid_shape, positive_int

RAW = "Alltoallv"

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv bench redistribute
  mpiexec -n 4 distconv bench redistribute --source n=4 --target h=2,w=2 --batch 8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench redistribute``."""
    parser.add_argument(
        "--size",
        type=positive_int,
        nargs="+",
        default=[128, 512, 1024],
        help="height and width of the tensor, one or more values (default: 128 512 1024)",
    )
    parser.add_argument(
        "--channels", type=positive_int, default=16, help="channels of the tensor (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive_int, default=1, help="samples of the tensor (default: %(default)s)")
    parser.add_argument(
        "--source",
        type=grid_shape,
        metavar="h=2",
        help="process grid before the redistribution (default: h over all ranks)",
    )
    parser.add_argument(
        "--target",
        type=grid_shape,
        metavar="w=2",
        help="process grid after the redistribution (default: w over all ranks)",
    )
    parser.add_argument(
        "--repeats", type=positive_int, default=50, help="redistributions per result (default: %(default)s)"
    )
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD."""
    world = MPI.COMM_WORLD
    source = dc.ProcessGrid(world, **(options.source or {"h": world.size}))
    target = dc.ProcessGrid(world, **(options.target or {"w": world.size}))
    if world.rank == 0:
        print(report.heading(f"redistribution from {source.describe()} to {target.describe()}, float32"))
    results = {}
    for size in options.size:
        shape = (options.batch, options.channels, size, size)
        times = time_interleaved(
            world, timed_variants(_actions(source, target, shape)), options.repeats, warm_up=WARM_UP
        )
        results[str(size)] = medians(times)
        if world.rank == 0:
            print(f"\nx {shape}\n{report.time_table(times, RAW, label='ms')}", flush=True)
    if world.rank == 0:
        report.print_json({"median_s": results}, options.json)
    return 0


def _actions(source: dc.ProcessGrid, target: dc.ProcessGrid, shape: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    x = dc.scatter(torch.randn(shape, generator=torch.Generator().manual_seed(0)), source)
    to = Distribution(target, default_axes(None, len(shape)))
    plan = transfer_plan(x.dist, to, shape)
    raw = RawTransfer(plan, x.local, [torch.empty(s) for s in plan.destination_shapes])
    return {RAW: raw.all_to_all, "messages": raw.point_to_point, "redistribute": lambda: x.redistribute(to)}
