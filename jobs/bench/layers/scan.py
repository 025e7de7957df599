"""Compare backward algorithms of a recurrent layer: the time of a training step.

The algorithms are torch's autograd, the sequential one (compiled by numba if it is installed), and Algorithm 1,
complete and truncated. They are interleaved in one run, for numbers of time steps T and mini-batch sizes B. The minimum
over the repetitions counts, since others may use the machine. As in the paper, only the last state has a gradient.
Several ranks share the time steps; the first number is then the time of one rank with all of them. Variants whose
estimated time is above --limit are left out.

Source: BPPSA, 4.1 and Figure 9: T = 10..30,000, B = 2..256, 20 hidden values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from distconv.grid import ProcessGrid
from distconv.jobs.bench import report
from distconv.jobs.timing import time_interleaved, timed_variants
from distconv.jobs.training.options import add_device_argument, positive_float, positive_int, select_device
from distconv.kernels.recurrence import is_compiled
from distconv.layers.recurrent import Method, ScanGRU, ScanRNN
from distconv.layers.recurrent.methods import BackwardProblem, fastest_method
from distconv.parallel import parallelize
from distconv.placement import scatter

EXAMPLES = """\
examples:
  distconv bench scan
  distconv bench scan --model gru --steps 10 100 1000 --batch 2 16
  mpiexec -n 2 distconv bench scan --steps 1000 30000 --batch 2
"""

LAYERS: dict[str, type[ScanRNN | ScanGRU]] = {"rnn": ScanRNN, "gru": ScanGRU}
WAYS = (Method.AUTOGRAD, Method.SEQUENTIAL, Method.BLELLOCH, Method.TRUNCATED)
NEAR = 1.1
"""Largest ratio of a choice's time to the fastest time at which the choice still counts as good."""
RATE = 5e9
"""Assumed operations per second, by which times are estimated for ``--limit``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench scan``."""
    parser.add_argument("--model", choices=LAYERS, default="rnn", help="recurrent layer (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=positive_int,
        nargs="+",
        default=[10, 100, 1000, 10_000, 30_000],
        help="numbers of time steps T (default: 10 100 1000 10000 30000)",
    )
    parser.add_argument(
        "--batch", type=positive_int, nargs="+", default=[2, 16, 256], help="mini-batch sizes B (default: 2 16 256)"
    )
    parser.add_argument(
        "--hidden", type=positive_int, default=20, help="size of the hidden state (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=5,
        help="interleaved repetitions of each backward algorithm (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=positive_float,
        default=2.0,
        metavar="S",
        help="leave out variants whose training step is estimated to take longer, in s (default: %(default)s)",
    )
    add_device_argument(parser)
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    device = torch.device(select_device(options.device, comm))
    loop = "compiled" if is_compiled(device, torch.float32, options.hidden) else "not compiled"
    if comm.rank == 0:
        what = f"{options.model} of {options.hidden} hidden values, float32, forward and backward, {comm.size} rank(s)"
        print(report.heading(f"{what}, {torch.get_num_threads()} thread(s), sequential: {loop}"))
        names = "".join(f"{way.value:>12}" for way in WAYS)
        print(f"minimum of {options.rounds} repetitions, ms")
        print(f"{'T':>6} {'B':>4}{names}  autograd/fastest  auto        auto/fastest")
    with ProcessGrid(comm, w=comm.size) as grid:
        cells = [_cell(options, grid, device, steps, batch) for steps in options.steps for batch in options.batch]
    ratios = [cell["auto_ratio"] for cell in cells if cell["auto_ratio"] is not None]
    good = sum(ratio <= NEAR for ratio in ratios)
    if comm.rank == 0:
        print(f"auto is within {NEAR - 1:.0%} of the fastest in {good} of {len(ratios)} cells")
        results = {"model": options.model, "ranks": comm.size, "sequential": loop, "cells": cells}
        report.print_json(results, options.json)
    return 0


def _cell(options: argparse.Namespace, grid: ProcessGrid, device: torch.device, steps: int, batch: int) -> Any:
    """Measure and print the times of all algorithms for one T and B. Collective."""
    runs = {
        way: _step(options, grid, device, way, (steps, batch))
        for way in WAYS
        if _arithmetic(options, way, steps, batch, grid.size) <= options.limit * RATE
    }
    times = time_interleaved(grid.world, timed_variants(runs, device), options.rounds)
    least = {way: min(seconds) for way, seconds in times.items()}
    gates = 1 if options.model == "rnn" else 3
    own = -(-steps // grid.size)  # of the rank with the most time steps
    chosen = fastest_method(BackwardProblem(own, batch, options.hidden, gates, grid.size, device, torch.float32))
    # torch's autograd cannot run over ranks. Its time on one rank is shown for comparison.
    offered = {way: least_s for way, least_s in least.items() if grid.size == 1 or way is not Method.AUTOGRAD}
    best = min(offered.values(), default=None)
    ratio = offered[chosen] / best if best and chosen in offered else None
    cell = {
        "steps": steps,
        "batch": batch,
        "least_s": {way.value: least_s for way, least_s in least.items()},
        "speedup": least[Method.AUTOGRAD] / best if best and Method.AUTOGRAD in least else None,
        "auto": chosen.value,
        "auto_ratio": ratio,
    }
    if grid.rank == 0:
        shown = "".join(f"{1e3 * least[way]:12.2f}" if way in least else f"{'-':>12}" for way in WAYS)
        ratios = [f"{cell['speedup']:16.2f}" if cell["speedup"] else f"{'-':>16}", f"{ratio:.2f}" if ratio else "-"]
        print(f"{steps:6} {batch:4}{shown}  {ratios[0]}  {chosen.value:<12}{ratios[1]}", flush=True)
    return cell


def _arithmetic(options: argparse.Namespace, way: Method, steps: int, batch: int, ranks: int) -> float:
    """Return the number of operations of a rank; most of them are matrix products of the scan."""
    gates = 1 if options.model == "rnn" else 3
    vector: int = 2 * batch * options.hidden**2
    work = gates + options.hidden if way.scans else 3 * gates
    return steps * vector * work / (1 if way is Method.AUTOGRAD else ranks)


def _step(
    options: argparse.Namespace, grid: ProcessGrid, device: torch.device, way: Method, size: tuple[int, int]
) -> Callable[[], object]:
    """Return a function that takes a step with the backward algorithm ``way`` on T time steps and B samples."""
    torch.manual_seed(0)
    layer = LAYERS[options.model](1, options.hidden, method=way.value).to(device)
    x: torch.Tensor = (torch.rand(*size, 1, device=device) < 0.5).float()
    if grid.size > 1 and way is not Method.AUTOGRAD:
        layer, x = parallelize(layer, grid), scatter(x, grid, dims="w--")

    def step() -> None:
        layer.zero_grad()
        _, last = layer(x)
        last.sum().backward()

    return step
