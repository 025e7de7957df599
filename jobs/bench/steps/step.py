"""Compare the time of a training step over a grid with plain torch.

Variants are interleaved, a few steps each, so that a drift of the machine's speed affects all of them. The machine
should be idle otherwise. Plain torch runs in child processes in several ways (:mod:`.torch_process`), of which the
fastest is the reference.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

import distconv as dc
from distconv.communication.transport import count_traffic
from distconv.jobs.bench import report
from distconv.jobs.bench.steps import torch_step
from distconv.jobs.bench.steps.torch_process import TorchProcess, add_compile_argument, torch_variants
from distconv.jobs.bench.steps.torch_step import StepOptions
from distconv.jobs.timing import CPU, idle, medians, time_action, time_interleaved
from distconv.jobs.training.options import grid_shape, positive_int

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv bench step --size 512 --channels 16 --layers 4 --memory-format channels_last
  mpiexec -n 4 distconv bench step --size 256 512 --batch 4 --grid n=2,h=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench step``."""
    parser.add_argument(
        "--size",
        type=positive_int,
        nargs="+",
        default=[512],
        help="height and width of the sample, one or more values (default: 512)",
    )
    parser.add_argument(
        "--layer", choices=torch_step.KINDS, default="convolution", help="type of the layers (default: %(default)s)"
    )
    parser.add_argument(
        "--channels", type=positive_int, default=16, help="channels of every layer (default: %(default)s)"
    )
    parser.add_argument("--layers", type=positive_int, default=4, help="number of layers (default: %(default)s)")
    parser.add_argument("--batch", type=positive_int, default=1, help="samples per step (default: %(default)s)")
    parser.add_argument(
        "--memory-format",
        choices=torch_step.FORMATS,
        default="contiguous",
        help="memory format of the input and the weights of distconv; torch is measured in both (default: %(default)s)",
    )
    add_compile_argument(parser)
    parser.add_argument("--grid", type=grid_shape, metavar="h=2", help="process grid (default: h over all ranks)")
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=9,
        help="interleaved repetitions of each variant, whose medians are compared (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=positive_int, default=2, help="training steps per repetition (default: %(default)s)"
    )
    report.add_json_argument(parser)


def _distributed(
    comm: MPI.Intracomm, grid_axes: dict[str, int], options: StepOptions, *, captured: bool = False
) -> Callable[[int], float]:
    """Return a function that takes eager or captured steps over a grid and returns the median of their seconds."""
    grid = dc.ProcessGrid(comm, **grid_axes)
    model, x, labels = torch_step.build(options)
    dc.parallelize(model, grid)
    trained = torch_step.training(model, dc.scatter(x, grid), dc.scatter(labels, grid, dims="nhw"), options)
    act = dc.capture(trained.step) if captured else trained.step
    for _ in range(2):  # without and with existing gradients: each case has its own recording
        act()
    return lambda count: statistics.median(time_action(comm, CPU, act) for _ in range(count))


def _measure(
    world: MPI.Intracomm, options: argparse.Namespace, size: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Measure seconds per step of every variant, and bytes of messages and all-reduces in a step; valid on rank 0."""
    alone = world.rank == 0
    threads = torch.get_num_threads()
    grid = options.grid or {"h": world.size}
    step = StepOptions(
        options.layer, size, options.channels, options.layers, options.batch, memory_format=options.memory_format
    )
    together = _distributed(world, grid, step)
    with count_traffic() as traffic:
        together(1)
    counts = {"messages": sum(traffic.sent.values()), "sums": sum(traffic.reduced.values())}
    moved = {name: world.allreduce(count) for name, count in counts.items()}
    ways = torch_variants(threads, world.size, compiled=options.compile)
    children = {name: TorchProcess(variant, step) for name, variant in ways.items() if alone}
    steps = {
        f"distconv, {world.size} ranks x {threads} thread(s)": together,
        f"distconv, {world.size} ranks x {threads} thread(s), captured": _distributed(world, grid, step, captured=True),
        f"distconv, 1 rank x {threads} thread(s)": _distributed(MPI.COMM_SELF, {}, step) if alone else None,
        **{name: children[name].steps if alone else None for name in ways},
    }
    variants = {name: partial(take, options.steps) if take else idle for name, take in steps.items()}
    times = time_interleaved(world, variants, options.rounds, asleep=True)
    for child in children.values():
        child.close()
    return times, moved


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    world = MPI.COMM_WORLD
    median: dict[str, Any] = {}
    bytes_moved: dict[str, Any] = {}
    if world.rank == 0:
        print(
            report.heading(
                f"training step, float32, {options.memory_format}, N={options.batch}, {options.layers} x "
                f"({torch_step.KINDS[options.layer]}), {options.channels} channels"
            )
        )
    for size in options.size:
        times, moved = _measure(world, options, size)
        if world.rank == 0:
            bytes_moved[str(size)] = moved
            median[str(size)] = medians(times)
            _print(size, times, world.size)
            print(f"all ranks send {moved['messages']:,} bytes in messages in a step, {moved['sums']:,} in all-reduces")
    if world.rank == 0:
        report.print_json({"median_s": median, "moved_bytes": bytes_moved}, options.json)
    return 0


def _print(size: int, times: dict[str, list[float]], world_size: int) -> None:
    (ranks, captured, one, *torchs) = times  # in the order in which _measure() makes the variants
    fastest = min(torchs, key=lambda name: statistics.median(times[name]))
    one_thread = min(torchs[-2:], key=lambda name: statistics.median(times[name]))
    print(f"\n{size} x {size}\n{report.time_table(times, fastest)}")
    limit = 1e3 * statistics.median(times[one_thread]) / world_size
    print(f"limit: {limit:.2f} ms, the time of {one_thread}, divided by {world_size} ranks")
    for a, b in ((ranks, fastest), (captured, fastest), (ranks, torchs[0]), (one, one_thread)):
        pairs = [x / y for x, y in zip(times[a], times[b], strict=True)]
        print(
            f"{a} / {b}: {statistics.median(pairs):.3f} (per repetition {min(pairs):.3f} to {max(pairs):.3f})",
            flush=True,
        )
