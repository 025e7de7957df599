"""Compute when the passes of a pipeline schedule run and how much memory they keep, and draw the timeline.

All times have the unit of the given costs. A cost is one number for all stages, or one per stage separated by commas.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import DistconvError
from distconv.pipeline import FAMILIES, Timeline, schedule, simulate, validate
from distconv.pipeline.schedules.memory import peak_memory, staleness

T = TypeVar("T")

EXAMPLES = """\
examples:
  distconv simulate --schedule 1f1b-so --stages 4 --microbatches 8 --transfer 0.2 --plot so.png
  distconv simulate --schedule 1f1b-sno --stages 3 --microbatches 8 --forward 1,1.2,0.9 --backward 2,2.4,1.8 \\
    --trace sno.json
  distconv simulate --schedule interleaved --stages 4 --microbatches 8 --chunks 2
  distconv simulate --schedule pipedream --stages 2 --microbatches 24 --replicas 2,1 --forward 2,1 --backward 4,2

schedules:
""" + "\n".join(f"  {name:<12} {family.summary}" for name, family in FAMILIES.items())

MOST_PASSES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv simulate``."""
    parser.add_argument("--schedule", required=True, metavar="NAME", help=f"schedule: {', '.join(FAMILIES)}")
    parser.add_argument("--stages", type=int, required=True, metavar="N", help="number of pipeline stages")
    parser.add_argument(
        "--microbatches",
        type=int,
        required=True,
        metavar="M",
        help="number of micro-batches, or of mini-batches of an asynchronous schedule",
    )
    parser.add_argument(
        "--forward",
        type=cost,
        default=1.0,
        help="time of a forward pass of one micro-batch on a stage (default: %(default)s)",
    )
    parser.add_argument(
        "--backward",
        type=cost,
        default=2.0,
        help="time of a backward pass of one micro-batch on a stage; with --weight, of its dL/dx alone (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--weight",
        type=cost,
        help="time of a backward pass's dL/dw, as a pass of its own (default: part of --backward)",
    )
    parser.add_argument(
        "--transfer", type=cost, default=0.0, help="latency of a message after each stage (default: %(default)s)"
    )
    parser.add_argument(
        "--update", type=cost, default=0.0, help="time of a stage's weight update (default: %(default)s)"
    )
    parser.add_argument(
        "--activation",
        type=cost,
        default=1.0,
        help="memory of the activations of one micro-batch (default: %(default)s)",
    )
    parser.add_argument("--replicas", type=counts, help="ranks of each stage (default: 1)")
    parser.add_argument("--chunks", type=int, help="model chunks on each stage; goes with the schedule interleaved")
    parser.add_argument(
        "--weights",
        metavar="POLICY",
        help="weight policy: stash, predict, newest or recompute (default: the schedule's own)",
    )
    parser.add_argument(
        "--vertical-sync",
        action="store_true",
        default=None,
        help="use one weight version of a micro-batch in all stages; goes with the schedule pipedream",
    )
    parser.add_argument(
        "--switch-after",
        type=int,
        metavar="M",
        help="number of mini-batches after which training is sequential; goes with the schedule stale",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a Gantt chart (.png, .pdf, .svg)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for chrome://tracing or Perfetto")


def run(options: argparse.Namespace) -> int:
    """Simulate, and print on rank 0. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DistconvError
        If a figure is requested and matplotlib is not installed, or there are too many passes.
    """
    if options.plot is not None and find_spec("matplotlib") is None:
        raise DistconvError("--plot: matplotlib is not installed. Install it, or distconv[plot].")
    passes = 2 * options.stages * options.microbatches
    if passes > MOST_PASSES:
        raise DistconvError(
            f"--stages {options.stages} --microbatches {options.microbatches}: too many passes ({passes:,} > "
            f"{MOST_PASSES:,}). Simulate fewer micro-batches."
        )
    timeline = simulate(
        _schedule(options),
        options.forward,
        options.backward,
        options.weight,
        options.transfer,
        options.update,
        options.activation,
        options.replicas,
    )
    validate(timeline.schedule)
    comm = MPI.COMM_WORLD
    try_on_all_ranks(comm, lambda: _write(timeline, options) if comm.rank == 0 else None, DistconvError)
    if comm.rank == 0:
        print(_report(timeline))
        for path in filter(None, (options.plot, options.trace)):
            print(f"written: {path}")
    return 0


def cost(text: str) -> float | list[float]:
    """Parse a cost: one number such as ``1.5``, or one number per stage such as ``1,1.2,0.9``."""
    return _one_or_several(text, float, "a number")


def counts(text: str) -> int | list[int]:
    """Parse a count: one integer such as ``2``, or one integer per stage such as ``2,1``."""
    return _one_or_several(text, int, "a whole number")


def _one_or_several(text: str, read: Callable[[str], T], what: str) -> T | list[T]:
    try:
        numbers = [read(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither {what} nor a list of them separated by commas") from None
    return numbers if "," in text else numbers[0]


def _schedule(options: argparse.Namespace) -> Any:
    given = {name: getattr(options, name) for name in ("chunks", "weights", "vertical_sync", "switch_after")}
    family = FAMILIES.get(options.schedule)
    if family is not None and "replicas" in family.options:
        given["replicas"] = options.replicas
    wanted = {name: value for name, value in given.items() if value is not None}
    return schedule(options.schedule, options.stages, options.microbatches, **wanted)


def _write(timeline: Timeline, options: argparse.Namespace) -> None:
    if options.plot is not None:
        timeline.plot(options.plot)
    if options.trace is not None:
        timeline.to_chrome_trace(options.trace)


def _report(timeline: Timeline) -> str:
    order = timeline.schedule
    lines = [
        f"{order.name}, {len(order.stages)} stages, {order.microbatches} micro-batches: "
        f"time {timeline.makespan:g}, bubble {timeline.bubble:.1%}",
        "stage  ranks  activations at most  weight versions  staleness",
    ]
    rows = zip(timeline.replicas, timeline.peak_activations, peak_memory(order), staleness(order), strict=True)
    for stage, (ranks, activations, memory, gap) in enumerate(rows):
        lines.append(f"{stage:5}  {ranks:5}  {activations:19g}  {memory.versions:15}  {gap:9}")
    return "\n".join(lines)
