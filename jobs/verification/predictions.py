"""How far predictions of training steps are off on this machine.

Some networks are profiled, predicted and measured under several grids on one rank and on all, in turns of one run; the
plan that the planner chooses is measured beside them. Printed are the median error, the rank correlation, and how
far the chosen plan is from the best that was measured.

Source: Dryden et al. 2019, V-A (profile), VI-B3 (predictions beside measurements).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial

import torch
from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.jobs.commands.profile import machine_of, profiled
from distconv.jobs.planning import measured_steps
from distconv.jobs.planning.options import on_rank_0, traced
from distconv.jobs.training.options import positive
from distconv.jobs.verification.accuracy import Row, print_accuracy, print_rows
from distconv.perfmodel.cost.candidates import resolve
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine, Roofline
from distconv.perfmodel.machine.measure_links import NetworkProfile, profile_network
from distconv.perfmodel.profiles.measure_operations import ROUNDS
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

PLANNED = "planned"

TURNS = 3
"""Times that a network is profiled, each time with its share of the steps behind it: the speed of a shared machine
changes within minutes, and is to change for both."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv verify predictions``."""
    parser.add_argument("--rounds", type=positive, default=15, help="steps of each variant (default: %(default)s)")
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
    device = torch.device("cpu")
    network = profile_network(comm, device)
    rows: list[Row] = []
    for name in names:
        rows += _rows(name, options.rounds, network, comm, device)
    if comm.rank == 0:
        _summarise(rows)
    return 0


def _rows(name: str, rounds: int, network: NetworkProfile, comm: MPI.Intracomm, device: torch.device) -> list[Row]:
    """Predicted and measured steps of a network; what is chosen follows from the first turn's profile. Collective."""
    graph = traced(CASES[name])
    profiles: list[Machine] = []
    plans: dict[int, dict[str, Plan]] = {}
    measured: dict[tuple[int, str], list[float]] = {}
    turns = min(TURNS, rounds)
    for turn in range(turns):
        case = argparse.Namespace(**vars(CASES[name]), rounds=rounds * (turn + 1) // turns - rounds * turn // turns)
        machine = machine_of("here", network, comm, device)
        grids = [{axis: comm.size} for axis in GRIDS]
        many = 1 if turn else ROUNDS
        profiles.append(profiled(machine, graph, [1, comm.size], comm, device, rounds=many, more=grids))
        for ranks in (1, comm.size):
            if ranks not in plans:
                plans[ranks] = on_rank_0(comm, partial(_plans, graph, profiles[0], ranks))
            for grid, seconds in measured_steps.measured(case, comm, ranks, plans[ranks], device).items():
                measured.setdefault((ranks, grid), []).extend(seconds)
    machine = _middle(profiles)
    rows = [
        Row(
            name,
            grid,
            f"{ranks} rank(s)",
            evaluate(graph, plans[ranks][grid], machine, ranks).time,
            statistics.median(seconds),
        )
        for (ranks, grid), seconds in measured.items()
    ]
    if comm.rank == 0:
        print_rows(rows)
    return rows


def _middle(profiles: Sequence[Machine]) -> Machine:
    """A machine with the median of each of the times and rates of ``profiles``."""
    entries = []
    for same in zip(*(machine.compute for machine in profiles), strict=True):
        rates = zip(*(astuple(entry.roofline) for entry in same), strict=True)
        keys = set.intersection(*(set(entry.table) for entry in same))
        table = {key: statistics.median(entry.table[key] for entry in same) for key in keys}
        entries.append(replace(same[0], roofline=Roofline(*map(statistics.median, rates)), table=table))
    return replace(profiles[0], compute=tuple(entries))


def _plans(graph: LayerGraph, machine: Machine, ranks: int) -> dict[str, Plan]:
    """One grid for all layers, along each axis; and what the planner chooses, by itself if it is none of them.

    Which it is the time that it has may decide.
    """
    grids = [{axis: ranks} for axis in GRIDS] if ranks > 1 else [{}]
    plans = {written(parts): Plan({"*": parts}, ranks) for parts in grids}
    if ranks == 1:
        return plans
    chosen = select(graph, machine, ranks).plan
    same = next((name for name, plan in plans.items() if _are_same(graph, plan, chosen, ranks)), None)
    if same is None:
        return {**plans, PLANNED: chosen}
    return {f"{name}, {PLANNED}" if name == same else name: plan for name, plan in plans.items()}


def _are_same(graph: LayerGraph, one: Plan, other: Plan, ranks: int) -> bool:
    """Whether two plans give all layers the same distributions."""
    grids = [
        {name: {axis: count for axis, count in parts.items() if count > 1} for name, parts in every.items()}
        for every in (resolve(graph, plan, ranks) for plan in (one, other))
    ]
    return grids[0] == grids[1]


def _summarise(rows: list[Row]) -> None:
    print_accuracy(rows)
    for name in dict.fromkeys(row.model for row in rows):
        several = [row for row in rows if row.model == name and row.what != "1 rank(s)"]
        best = min(several, key=lambda row: row.measured)
        planned = next(row for row in several if row.name.endswith(PLANNED))
        print(f"{name}: planned {planned.measured / best.measured - 1:+.1%} from the best measured ({best.name})")
