"""Time a halo exchange and its adjoint, and compare them with raw MPI.

"bare messages" are the same messages from and into contiguous buffers. "raw" also packs them from the tensor and
unpacks them into the halo.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from mpi4py import MPI

import distconv as dc
from distconv.communication.transfer import TransferPlan, transfer_plan
from distconv.distribution import Distribution, default_axes
from distconv.errors import DistconvError
from distconv.jobs.bench import report
from distconv.jobs.bench.messages import WARM_UP
from distconv.jobs.bench.messages.raw_transfer import RawTransfer
from distconv.jobs.timing import medians, time_interleaved, timed_variants
from distconv.jobs.training.options import grid_shape, positive_int
from distconv.kernels.convolution import Geometry
from distconv.layers.common.input_windows import window_needs

RAW = "raw"

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv bench halo
  mpiexec -n 4 distconv bench halo --size 1024 --kernel 5 --grid h=2,w=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench halo``."""
    parser.add_argument(
        "--size",
        type=positive_int,
        nargs="+",
        default=[256, 512, 1024],
        help="height and width of the tensor, one or more values (default: 256 512 1024)",
    )
    parser.add_argument(
        "--channels", type=positive_int, default=16, help="channels of the tensor (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive_int, default=1, help="samples of the tensor (default: %(default)s)")
    parser.add_argument(
        "--kernel",
        type=positive_int,
        default=3,
        help="odd kernel size; the halo is kernel // 2 wide (default: %(default)s)",
    )
    parser.add_argument("--grid", type=grid_shape, metavar="h=2,w=2", help="process grid (default: h over all ranks)")
    parser.add_argument("--repeats", type=positive_int, default=50, help="exchanges per result (default: %(default)s)")
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DistconvError
        If the kernel size is even, since neighbors would then exchange halos of different widths.
    """
    world = MPI.COMM_WORLD
    if options.kernel % 2 == 0:
        raise DistconvError(f"--kernel {options.kernel}: the kernel size must be odd. Use {options.kernel + 1}.")
    grid = dc.ProcessGrid(world, **(options.grid or {"h": world.size}))
    if world.rank == 0:
        print(report.heading(f"halo exchange over {grid.describe()}, float32, kernel {options.kernel}"))
    results = {}
    for size in options.size:
        shape = (options.batch, options.channels, size, size)
        plan = _halo_plan(grid, shape, options.kernel)
        times = time_interleaved(world, timed_variants(_actions(plan)), options.repeats, warm_up=WARM_UP)
        # Ranks at a wall send one side only; those between two neighbours send the most.
        sent = world.allreduce(sum(peer.numel for peer in plan.sends) * 4, MPI.MAX)
        results[str(size)] = medians(times)
        if world.rank == 0:
            print(
                f"\nx {shape}, at most {sent} bytes sent per rank\n{report.time_table(times, RAW, label='ms')}",
                flush=True,
            )
    if world.rank == 0:
        report.print_json({"median_s": results}, options.json)
    return 0


def _halo_plan(grid: dc.ProcessGrid, shape: tuple[int, ...], kernel: int) -> TransferPlan:
    dist = Distribution(grid, default_axes(None, len(shape)))
    geometry = Geometry((kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1))
    return transfer_plan(dist, window_needs(dist, shape, shape, geometry), shape, ghosts=True)


def _actions(plan: TransferPlan) -> dict[str, Callable[[], object]]:
    local, ghosts = torch.randn(plan.local_shape), [torch.randn(s) for s in plan.destination_shapes]
    raw = RawTransfer(plan, local, ghosts)
    return {
        "bare messages": raw.messages,
        RAW: raw.point_to_point,
        "halo exchange": lambda: plan.start(local).finish(),
        "halo accumulation": lambda: plan.start_accumulate(ghosts, local).finish(local),
    }
