"""Compare the peak resident memory of a training step per rank of a grid with that of one rank by itself.

With ``--shard-optimizer``, the ranks run with a split optimizer state first, and then with a full one on each rank.
Peaks are those of the operating system (ru_maxrss). The memory of the interpreter and its libraries, before the model
is built, is shown separately, since no grid can split it. Each run has the default allocator settings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from distconv.distribution import Distribution, default_axes
from distconv.grid import ProcessGrid
from distconv.jobs.bench import report
from distconv.jobs.bench.child_processes import MIB, Peak, run_in_new_process
from distconv.jobs.bench.steps import model_options
from distconv.jobs.planning.measured_steps import random_tensor
from distconv.jobs.planning.options import run_on_rank_0
from distconv.jobs.planning.package_memory import packages_bytes
from distconv.jobs.training.options import add_shard_weights_argument
from distconv.jobs.training.report import peak_memory_bytes
from distconv.parallel import parallelize
from distconv.parameters.optimizer_state import shard_optimizer
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.cost.process_memory import START_BYTES, ProcessMemory, process_memory
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.machine import Machine

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv bench memory --model mesh1k --size 1024 --grid h=4
  mpiexec -n 4 distconv bench memory --model unet --size 512 --batch 2 --grid n=2,h=2 --json memory.json
  mpiexec -n 4 distconv bench memory --model package.module:factory --input 4,640,640 --optimizer adamw --grid h=4
  mpiexec -n 4 distconv bench memory --model vgg16_bn --size 32 --batch 16 --optimizer adam --shard-optimizer
  mpiexec -n 4 distconv bench memory --model vgg16_bn --size 32 --batch 16 --optimizer adam --shard-weights all
"""

OPTIMIZERS: dict[str, tuple[Any, int]] = {
    "sgd": (torch.optim.SGD, 0),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), 1),
    "adam": (torch.optim.Adam, 2),
    "adamw": (torch.optim.AdamW, 2),
}
"""Constructor of each optimizer, and its number of state tensors per parameter after the first step."""

TRAINED = {
    "sgd": "one step of SGD",
    "momentum": "two steps of SGD with momentum",
    "adam": "two steps of Adam",
    "adamw": "two steps of AdamW",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench memory``."""
    model_options.add_arguments(parser, model="mesh1k", size=1024, batch=1, user_models=True)
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="sgd",
        help="optimizer; those with state take two steps, since the first creates the state (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-optimizer",
        action="store_true",
        help="measure with and without an optimizer state that is split over the ranks",
    )
    add_shard_weights_argument(parser, "none")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    if options.alone:
        print(json.dumps(asdict(measure(options, ProcessGrid(MPI.COMM_SELF)))))
        return 0
    grid = ProcessGrid(comm, **(options.grid or {"h": comm.size}))
    # The run on one rank goes first, while the other ranks have no tensors and sleep.
    alone = run_on_rank_0(comm, lambda: measure_by_itself(options))
    # The split state goes first, since it takes less: the peak of a process never falls.
    split = comm.gather(measure(options, grid, split=True), root=0) if options.shard_optimizer else None
    peaks = comm.gather(measure(options, grid), root=0)
    if peaks is not None:
        if split is not None:
            peaks = [replace(peak, before=first.before) for peak, first in zip(peaks, split, strict=True)]
        _report(options, grid, alone, peaks, split)
    return 0


def measure(options: argparse.Namespace, grid: ProcessGrid, *, split: bool = False) -> Peak:
    """Train a few steps on random samples and measure the memory of this rank. Collective.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    grid : ProcessGrid
    split : bool
        True splits the optimizer's state over the ranks.

    Returns
    -------
    Peak
    """
    before = peak_memory_bytes()
    model = parallelize(model_options.make_model(options), grid, shard_weights=options.shard_weights)
    make, slots = OPTIMIZERS[options.optimizer]
    optimizer = make(model.parameters(), 1e-3)
    if split:
        shard_optimizer(optimizer, grid.world)
    shape = model_options.batch_shape(options)
    x = random_tensor(Distribution(grid, default_axes(None, len(shape))), shape, model_options.CPU)
    for _ in range(2 if slots else 1):
        start = time.perf_counter()
        model_options.random_label_loss(options, model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Peak(before, peak_memory_bytes(), time.perf_counter() - start)


def predict_memory(options: argparse.Namespace, axes: Mapping[str, int], ranks: int, before: int) -> ProcessMemory:
    """Predict the memory of a rank of a grid, as ``distconv plan`` does for a training.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    axes : mapping of str to int
        Size of each grid axis.
    ranks : int
    before : int
        Bytes of the process before its model is built. This command has loaded the planner's libraries, which a
        training does not need.

    Returns
    -------
    ProcessMemory
    """
    machine = Machine.load("localhost")
    graph = trace(model_options.make_model(options), model_options.batch_shape(options))
    slots = OPTIMIZERS[options.optimizer][1]
    sharded = options.shard_weights or False
    prediction = evaluate(graph, {"*": dict(axes)}, machine, ranks, shard_weights=sharded, optimizer_slots=slots)
    parts = AxisParts.from_axes(axes, ranks, machine.ranks_per_node)
    packages = packages_bytes(options.model) + max(0, before - START_BYTES)
    return process_memory(graph, dict.fromkeys(graph.deciding, parts), prediction, packages)


def measure_by_itself(options: argparse.Namespace) -> Peak:
    """Run the same step in a new process outside this job.

    Raises
    ------
    DistconvError
        If the process fails.
    """
    words = ["memory", "--alone", "--model", options.model, "--size", str(options.size), "--batch", str(options.batch)]
    words += ["--optimizer", options.optimizer]
    words += ["--input", ",".join(map(str, options.input))] if options.input else []
    words += ["--classes", str(options.classes)] if options.classes else []
    return run_in_new_process(words + (["--width", str(options.width)] if options.width else []))


def _report(
    options: argparse.Namespace, grid: ProcessGrid, alone: Peak, peaks: list[Peak], split: list[Peak] | None
) -> None:
    worst, worst_used = max(peak.peak for peak in peaks), max(peak.used for peak in peaks)
    print(
        f"{options.model}{f' of width {options.width}' if options.width else ''}, "
        f"{' x '.join(map(str, model_options.batch_shape(options)))}, float32, cpu, {TRAINED[options.optimizer]}"
    )
    print(f"{'':<24}{'process':>12}{'libraries':>12}{'model':>12}{'step':>9}")
    _print_row("one rank", alone)
    for rank, peak in enumerate(peaks):
        _print_row(f"{grid.describe()}, rank {rank}", peak)
    for rank, peak in enumerate(split or ()):
        _print_row(f"state split, rank {rank}", peak)
    ratio, whole = worst_used / alone.used, worst / alone.peak
    print(f"peak of the model per rank, against one rank: {ratio:.3f} (1/{grid.size} = {1 / grid.size:.3f})")
    print(f"peak of the process, libraries included:  {whole:.3f}")
    axes = {axis: n for axis, n in grid.shape.items() if n > 1} or {"n": 1}
    prediction = predict_memory(options, axes, grid.size, max(peak.before for peak in peaks))
    print(
        f"predicted for the process: {prediction.total / MIB:.0f} MiB (tensors {prediction.tensors / MIB:.0f}, "
        f"libraries {prediction.libraries / MIB:.0f}, convolutions {prediction.convolutions / MIB:.0f}, holes "
        f"{prediction.holes / MIB:.0f}); worst rank: measured / predicted {worst / prediction.total:.2f}"
    )
    if split is not None:
        less = max(peak.used for peak in split)
        print(f"peak of the model per rank with split state: {less / MIB:.0f} of {worst_used / MIB:.0f} MiB")
    figures: dict[str, Any] = {
        "alone": asdict(alone),
        "ranks": [asdict(peak) for peak in peaks],
        "ratio": ratio,
        "process_ratio": whole,
        "predicted": asdict(prediction),
        "predicted_alone": asdict(predict_memory(options, {"n": 1}, 1, alone.before)),
        "split": None if split is None else [asdict(peak) for peak in split],
    }
    report.print_json({"model": options.model, "size": options.size, "grid": grid.describe(), **figures}, options.json)


def _print_row(name: str, peak: Peak) -> None:
    figures = "".join(f"{nbytes / MIB:>8.0f} MiB" for nbytes in (peak.peak, peak.before, peak.used))
    print(f"{name:<24}{figures}{peak.step_s:>7.1f} s")
