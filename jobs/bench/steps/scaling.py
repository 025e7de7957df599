"""Compare measured and predicted step times on 1, 2, 4, ... ranks, and predict those on more.

A step is forward, mean-square loss, backward and SGD with momentum. On each number of ranks, data parallelism, spatial
parallelism and the planned parallelism are interleaved, while the other ranks sleep.

Source: Dryden et al. 2019, VI-B.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from distconv.jobs.bench import report
from distconv.jobs.bench.report import TimeComparison
from distconv.jobs.planning import picture
from distconv.jobs.planning.measured_steps import time_plans
from distconv.jobs.planning.options import (
    add_machine_argument,
    add_network_arguments,
    check_writable,
    run_on_rank_0,
    trace_network,
)
from distconv.jobs.planning.strong_scaling import Curves, Scaling, rank_counts, select_strategies
from distconv.jobs.training.options import add_device_argument, positive_int, select_device
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.strategy.selection import pure_parallelism
from distconv.plan import Plan, format_parts

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv bench scaling --model resnet20 --input 3,32,32 --batch 16 --machine localhost
  mpiexec -n 4 distconv bench scaling --model unet --width 8 --input 18,256,256 --batch 4 --machine ./mine.yaml \\
      --predict-to 64 --plot scaling.png
"""

Plans = dict[str, Plan]
"""Plans that are measured on one number of ranks, by the kind of parallelism."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench scaling``."""
    add_network_arguments(parser)
    add_machine_argument(parser, required=True)
    parser.add_argument(
        "--predict-to",
        type=positive_int,
        default=2048,
        metavar="RANKS",
        help="largest number of ranks to predict step times for (default: %(default)s)",
    )
    add_device_argument(parser)
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="interleaved repetitions of each variant (default: %(default)s)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw measured and predicted times into this file (.png, .pdf, .svg)",
    )
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Predict on rank 0, measure, print and draw. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    device = torch.device(select_device(options.device, comm))
    plans, scaling = run_on_rank_0(comm, lambda: _predicted(options, comm.size))
    times: dict[str, dict[int, list[float]]] = {}
    for ranks, variants in plans.items():
        for name, seconds in time_plans(options, comm, ranks, variants, device).items():
            times.setdefault(name, {})[ranks] = seconds
    run_on_rank_0(comm, lambda: _report(options, device, plans, scaling, times))
    return 0


# -- predicting -------------------------------------------------------------------------------------------------------


def _predicted(options: argparse.Namespace, most: int) -> tuple[dict[int, Plans], Scaling]:
    """Return the plans to measure on up to ``most`` ranks, and predictions for these and more."""
    if options.plot is not None:
        check_writable("--plot", options.plot)
        picture.check_format(options.plot)
    machine, graph = Machine.load(options.machine), trace_network(options)
    counts = sorted({*rank_counts(most), *rank_counts(max(most, options.predict_to))})
    planned = select_strategies(graph, machine, counts)
    plans = {}
    for ranks in rank_counts(most):
        alone = {
            f"pure {name}": Plan({"*": parts}, ranks) for name, parts in pure_parallelism(graph, ranks).items() if parts
        }
        plans[ranks] = {"planned": planned[ranks].plan} | (alone if ranks > 1 else {})
    return plans, Scaling.of(graph, machine, planned)


# -- reporting --------------------------------------------------------------------------------------------------------


def _report(
    options: argparse.Namespace,
    device: torch.device,
    plans: Mapping[int, Plans],
    scaling: Scaling,
    times: Mapping[str, Mapping[int, list[float]]],
) -> None:
    predicted = scaling.curves
    what = f"{options.model}, {options.batch} samples of {' x '.join(map(str, options.input))}"
    print(
        report.heading(
            f"training step of {what}, float32, {device.type}, {torch.get_num_threads()} thread(s) per rank, "
            f"predicted for {options.machine}"
        )
    )
    print(report.comparison_head(f"ms per step, {options.rounds} steps"))
    rows = {
        name: {
            ranks: TimeComparison(
                f"{ranks} rank{'s' * (ranks > 1)}, {name}{_grid(plans[ranks][name])}",
                seconds,
                predicted[name][ranks].time,
            )
            for ranks, seconds in row_of.items()
        }
        for name, row_of in times.items()
    }
    for ranks, variants in plans.items():
        for name in variants:
            print(report.comparison_row(rows[name][ranks]))
    _print_predictions(predicted)
    if scaling.profile_end is not None:
        print(f"beyond {scaling.profile_end} ranks layers were not measured: their times are estimated by the roofline")
    figures: dict[str, Any] = {
        "measured": {name: {ranks: row.as_json() for ranks, row in row_of.items()} for name, row_of in rows.items()},
        "predicted_s": {name: {n: point.time for n, point in row_of.items()} for name, row_of in predicted.items()},
    }
    report.print_json(figures, options.json)
    if options.plot is not None:
        picture.draw_measured(options.plot, scaling, times, what)
        print(f"figure: {options.plot}")


def _grid(plan: Plan) -> str:
    """Return a note on the grid of a plan, or on the number of its grids."""
    grids = {format_parts(parts) for parts in plan.layers.values()}
    return f" ({next(iter(grids))})" if len(grids) == 1 else f" ({len(grids)} grids)"


def _print_predictions(predicted: Curves) -> None:
    print(f"\n{'predicted ms per step':<24}{''.join(f'{name:>14}' for name in predicted)}")
    for ranks in predicted["planned"]:
        times = [f"{1e3 * row_of[ranks].time:.3f}" if ranks in row_of else "-" for row_of in predicted.values()]
        print(f"{ranks:>6} ranks{'':<12}{''.join(time.rjust(14) for time in times)}")
