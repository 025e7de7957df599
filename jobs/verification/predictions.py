"""How far predictions of training steps are off on this machine.

Some networks are profiled, predicted and measured under several grids on one rank and on all, in turns of one run; then
the plan that the planner chooses is measured beside them. Printed are the median error, the rank correlation, and how
far the chosen plan is from the best that was measured.

Source: Dryden et al. 2019, V-A (profile), VI-B3 (predictions beside measurements).
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.jobs.commands.profile import machine_of, profiled
from distconv.jobs.planning import measured_steps
from distconv.jobs.planning.options import on_rank_0, traced
from distconv.jobs.training.options import positive
from distconv.jobs.verification.accuracy import Row, print_accuracy, print_rows
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.machine.measure_links import profile_network
from distconv.perfmodel.strategy.selection import select
from distconv.plan import Plan, written

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv verify predictions
  mpiexec -n 2 distconv verify predictions --models lenet5,resnet20 --rounds 5
"""

CASES = {
    model: argparse.Namespace(model=model, input=sample, batch=batch, width=width, classes=None)
    for model, sample, batch, width in (
        ("lenet5", (1, 28, 28), 64, None),
        ("unet", (18, 64, 64), 2, 16),
        ("resnet20", (3, 32, 32), 32, None),
        ("vgg11_bn", (3, 32, 32), 16, None),
        ("mesh1k", (18, 384, 384), 2, 32),
    )
}
"""Networks with the extents of their mini-batches, as the commands that plan take them."""


GRIDS = ("n", "h", "w", "c")
"""Axes along which all ranks are put, one after the other."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv verify predictions``."""
    parser.add_argument("--rounds", type=positive, default=9, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--models", default=",".join(CASES), help="some of %(default)s")


def run(options: argparse.Namespace) -> int:
    """Profile, predict, measure, print. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DistconvError
        If there is one rank only, or no such network.
    """
    comm, names = MPI.COMM_WORLD, options.models.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise DistconvError(f"--models {unknown[0]}: there is no such network; there are {', '.join(CASES)}")
    if comm.size == 1:
        raise DistconvError("one rank has nothing to choose a plan for; start it with mpiexec -n 2, or more")
    rows: list[Row] = []
    device = torch.device("cpu")
    machine = machine_of("here", profile_network(comm, device), comm, device)
    for name in names:
        case = argparse.Namespace(**vars(CASES[name]), rounds=options.rounds)
        graph = traced(case)
        machine = profiled(machine, graph, [1, comm.size], comm, device)
        for ranks in (1, comm.size):
            plans = on_rank_0(comm, partial(_plans, graph, machine, ranks))
            measured = measured_steps.measured(case, comm, ranks, plans, device)
            for grid, plan in plans.items():
                predicted = evaluate(graph, plan, machine, ranks).time
                rows.append(Row(name, grid, f"{ranks} rank(s)", predicted, statistics.median(measured[grid])))
            if comm.rank == 0:
                print_rows(rows[-len(plans) :])
    if comm.rank == 0:
        _summarise(rows)
    return 0


def _plans(graph: LayerGraph, machine: Machine, ranks: int) -> dict[str, Plan]:
    """One grid for all layers, along each axis; and what the planner chooses, which the time it has may decide."""
    grids = [{axis: ranks} for axis in GRIDS] if ranks > 1 else [{}]
    plans = {written(parts): Plan({"*": parts}, ranks) for parts in grids}
    return plans | ({"planned": select(graph, machine, ranks).plan} if ranks > 1 else {})


def _summarise(rows: list[Row]) -> None:
    print_accuracy(rows)
    for name in dict.fromkeys(row.model for row in rows):
        several = [row for row in rows if row.model == name and row.what != "1 rank(s)"]
        best = min(several, key=lambda row: row.measured)
        planned = next(row for row in several if row.name == "planned")
        print(f"{name}: planned {planned.measured / best.measured - 1:+.1%} from the best measured ({best.name})")
