"""``distconv bench halo``: time of a halo exchange and of its adjoint, against bare messages of the same volume."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from mpi4py import MPI

import distconv as dc
from distconv.communication.transfer import TransferPlan, transfer_plan
from distconv.distribution import Distribution, default_axes
from distconv.errors import DistconvError
from distconv.jobs.bench import report
from distconv.jobs.bench.comparison import timed
from distconv.jobs.training.options import grid_extents, positive
from distconv.kernels.convolution import Geometry
from distconv.layers.plumbing.input_windows import window_needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv bench halo``."""
    parser.add_argument(
        "--size", type=positive, nargs="+", default=[256, 512, 1024], help="height and width of the tensor"
    )
    parser.add_argument("--channels", type=positive, default=16, help="channels")
    parser.add_argument("--batch", type=positive, default=1, help="samples")
    parser.add_argument("--kernel", type=positive, default=3, help="odd kernel size; the halo is kernel // 2 wide")
    parser.add_argument("--grid", type=grid_extents, metavar="h=2,w=2", help="process grid (default: h over all ranks)")
    parser.add_argument("--repeats", type=positive, default=50, help="exchanges per figure")


def _halo_plan(grid: dc.ProcessGrid, shape: tuple[int, ...], kernel: int) -> TransferPlan:
    dist = Distribution(grid, default_axes(None, len(shape)))
    geometry = Geometry((kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1))
    return transfer_plan(dist, window_needs(dist, shape, geometry), shape, ghosts=True)


def _bare(plan: TransferPlan, like: torch.Tensor) -> Callable[[], None]:
    """The same messages from and into ready, contiguous buffers: what MPI alone costs."""
    sends = [(peer.rank, like.new_zeros(peer.numel).numpy()) for peer in plan.sends]
    receives = [(peer.rank, like.new_zeros(peer.numel).numpy()) for peer in plan.receives]

    def exchange() -> None:
        requests = [plan.comm.Irecv(buffer, peer) for peer, buffer in receives]
        requests += [plan.comm.Isend(buffer, peer) for peer, buffer in sends]
        MPI.Request.Waitall(requests)

    return exchange


def _times(comm: MPI.Intracomm, actions: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each action, the slowest rank's, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 5):
        for name, action in actions.items():
            slowest = timed(comm, torch.device("cpu"), action)
            if turn >= 5:
                times[name].append(slowest)
    return times


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DistconvError
        If the kernel's extent is even: its halo would be no exchange between equals.
    """
    world = MPI.COMM_WORLD
    if options.kernel % 2 == 0:
        raise DistconvError(f"--kernel {options.kernel}: the extent must be odd; use {options.kernel + 1}")
    grid = dc.ProcessGrid(world, **(options.grid or {"h": world.size}))
    if world.rank == 0:
        print(report.heading(f"halo exchange over {grid.describe()}, float32, kernel {options.kernel}"))
    medians = {}
    for size in options.size:
        shape = (options.batch, options.channels, size, size)
        plan = _halo_plan(grid, shape, options.kernel)
        local = torch.randn(plan.local_shape)
        ghosts = [torch.randn(s) for s in plan.part_shapes]
        actions: dict[str, Callable[[], None]] = {
            "bare messages": _bare(plan, local),
            "halo exchange": lambda plan=plan, local=local: _ignore(plan.start(local).finish()),  # type: ignore[misc]
            "halo accumulation": lambda plan=plan, local=local, ghosts=ghosts: _ignore(  # type: ignore[misc]
                plan.start_accumulate(ghosts, local).finish(local)
            ),
        }
        times = _times(world, actions, options.repeats)
        sent = world.allreduce(sum(peer.numel for peer in plan.sends) * local.element_size(), MPI.MAX)
        medians[str(size)] = {name: statistics.median(values) for name, values in times.items()}
        if world.rank == 0:
            print(f"\nx {shape}, at most {sent} bytes sent per rank\n{report.table_head('ms', 'to bare')}")
            bare = statistics.median(times["bare messages"])
            for name, values in times.items():
                print(report.row(name, values, bare), flush=True)
    if world.rank == 0:
        print(report.as_json({"median_s": medians}))
    return 0


def _ignore(_: object) -> None:
    pass
