"""Compare predicted with measured training step times on this machine.

Some networks are profiled, predicted, and measured under several grids on one rank and on all, interleaved in one run.
Then the planner's choice and the best of these grids are measured. The command prints the median error, the rank
correlation, and the distance of the chosen plan from the best grid.

Source: Dryden et al. 2019, V-A (profile), VI-B3 (predictions and measurements).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.jobs.commands.profile import add_layer_times, combine_machines, measure_machine, measure_mode
from distconv.jobs.planning import measured_steps
from distconv.jobs.planning.options import add_step_mode_arguments, run_on_rank_0, step_mode, trace_network
from distconv.jobs.timing import CPU
from distconv.jobs.training.options import positive_int
from distconv.jobs.verification.accuracy import AccuracyRow, print_accuracy, print_rows
from distconv.perfmodel.cost.candidates import resolve
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.machine.measure_links import NetworkProfile, profile_network
from distconv.perfmodel.machine.step_mode import StepMode
from distconv.perfmodel.strategy.selection import select
from distconv.plan import Plan, format_parts

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv verify predictions
  mpiexec -n 2 distconv verify predictions --models lenet5,resnet20 --rounds 5
  mpiexec -n 2 distconv verify predictions --models unet --memory-format channels_last --captured
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
"""Axes of the measured grids. Each grid has all ranks along one of them."""

PLANNED = "planned"

MEASUREMENTS = 3
"""Number of measurements. Each profiles the network, and then times a part of the steps.

The speed of a shared machine changes within minutes, which affects interleaved profiles and steps equally.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv verify predictions``."""
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=15,
        help="interleaved training steps of each variant (default: %(default)s)",
    )
    parser.add_argument(
        "--models", default=",".join(CASES), help="networks, separated by commas (default: %(default)s)"
    )
    add_step_mode_arguments(parser, "measure and predict")


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
    network = profile_network(comm, CPU)
    compared = [_compared(name, options.rounds, network, comm, step_mode(options)) for name in names]
    if comm.rank == 0:
        print_accuracy([row for each in compared for row in each.rows])
        for each in compared:
            print(
                f"{each.rows[0].model}: planned {each.ratio_to_best - 1:+.1%} from the best grid measured ({each.best})"
            )
    return 0


@dataclass(frozen=True)
class _Compared:
    """A network's predictions and measurements, and the chosen plan's time relative to the ``best`` grid."""

    rows: list[AccuracyRow]
    best: str
    ratio_to_best: float


def _compared(name: str, rounds: int, network: NetworkProfile, comm: MPI.Intracomm, mode: StepMode) -> _Compared:
    """Profile and measure, interleaved; then measure the planner's choice and the best grid. Collective."""
    graph = trace_network(CASES[name], measured_steps.mean_square_loss)
    plans = {
        ranks: {format_parts(parts): Plan({"*": parts}, ranks) for parts in _grids(ranks)} for ranks in (1, comm.size)
    }
    machine, seconds = _time_interleaved(name, graph, plans, rounds, network=network, comm=comm, mode=mode)

    def row(ranks: int, grid: str, plan: Plan, times: list[float]) -> AccuracyRow:
        predicted = evaluate(graph, plan, machine, ranks).time
        return AccuracyRow(name, grid, f"{ranks} rank(s)", predicted, times)

    rows = [row(ranks, grid, plans[ranks][grid], times) for (ranks, grid), times in seconds.items()]
    together = {row.name: row for row in rows[1:]}
    best = min(together, key=lambda grid: together[grid].measured)
    chosen = run_on_rank_0(comm, lambda: select(graph, machine, comm.size).plan)
    same = next((grid for grid, plan in plans[comm.size].items() if _are_same(graph, plan, chosen, comm.size)), None)
    if same is None:
        both = _steps(name, comm.size, {best: plans[comm.size][best], PLANNED: chosen}, rounds, comm, mode=mode)
        rows.append(row(comm.size, PLANNED, chosen, both[PLANNED]))
        ratio_to_best = min(both[PLANNED]) / min(both[best])
    else:
        rows = [replace(row, name=f"{same}, {PLANNED}") if row is together[same] else row for row in rows]
        ratio_to_best = together[same].measured / together[best].measured
    if comm.rank == 0:
        print_rows(rows)
    return _Compared(rows, best, ratio_to_best)


def _grids(ranks: int) -> list[dict[str, int]]:
    return [{axis: ranks} for axis in GRIDS] if ranks > 1 else [{}]


def _time_interleaved(
    name: str,
    graph: LayerGraph,
    plans: Mapping[int, Mapping[str, Plan]],
    rounds: int,
    *,
    network: NetworkProfile,
    comm: MPI.Intracomm,
    mode: StepMode,
) -> tuple[Machine, dict[tuple[int, str], list[float]]]:
    """Profile this machine for the network, and time steps by rank count and grid. Collective."""
    profiles: list[Machine] = []
    seconds: dict[tuple[int, str], list[float]] = {}
    count = min(MEASUREMENTS, rounds)
    for number in range(count):
        machine = measure_mode(measure_machine("here", network, comm, CPU), mode, comm, CPU)
        extra_candidates = _grids(comm.size)
        profiles.append(
            add_layer_times(
                machine, graph, list(plans), comm, CPU, rounds=1, extra_candidates=extra_candidates, mode=mode
            )
        )
        # Each profile is followed by its part of the rounds, so that a drift of the machine's speed affects both.
        share = rounds * (number + 1) // count - rounds * number // count
        for ranks, which in plans.items():
            for grid, times in _steps(name, ranks, which, share, comm, mode=mode).items():
                seconds.setdefault((ranks, grid), []).extend(times)
    return combine_machines(profiles).in_mode(mode), seconds


def _steps(
    name: str, ranks: int, plans: Mapping[str, Plan], rounds: int, comm: MPI.Intracomm, *, mode: StepMode
) -> dict[str, list[float]]:
    case = argparse.Namespace(**vars(CASES[name]), rounds=rounds)
    return measured_steps.time_plans(case, comm, ranks, plans, CPU, mode=mode)


def _are_same(graph: LayerGraph, one: Plan, other: Plan, ranks: int) -> bool:
    """Return True if two plans give all layers the same distributions."""
    grids = [
        {name: {axis: count for axis, count in parts.items() if count > 1} for name, parts in every.items()}
        for every in (resolve(graph, plan, ranks) for plan in (one, other))
    ]
    return grids[0] == grids[1]
