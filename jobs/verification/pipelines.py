"""Compare predicted with measured step times of pipelines on this machine.

Some networks are profiled. After each profile, the choices of ``distconv explore`` and other pipelines and
distributions are measured, interleaved in one run. The command prints predicted and measured times, the rank
correlation, and the distance of the choice from the best measured time. Nothing is fitted to the measured steps:
layers, links, passes without compute, the optimizer and the synchronization of replicas are measured one by one.

Source: Zhao et al. 2020 (BaPipe), 3.2 (exploration), Dryden et al. 2019, VI-B3 (predictions and measurements).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.jobs.commands.explore import (
    DEFAULT,
    Measurements,
    combine_measurements,
    graph_of,
    measure_once,
    search_candidates,
)
from distconv.jobs.planning.chosen_pipeline import pipeline_plan
from distconv.jobs.planning.measured_steps import pipeline_step_s
from distconv.jobs.planning.options import build_network, run_on_rank_0
from distconv.jobs.timing import CPU
from distconv.jobs.training.options import positive_int
from distconv.jobs.verification.accuracy import AccuracyRow, print_accuracy, print_rows
from distconv.perfmodel import predicted_profile
from distconv.perfmodel.exploration.candidate_stages import (
    PARALLEL,
    ExplorationContext,
    PipelineCandidate,
    round_to_layers,
)
from distconv.perfmodel.exploration.choices import Choice
from distconv.perfmodel.exploration.explore import make_choice
from distconv.perfmodel.machine.measure_links import NetworkProfile, profile_network
from distconv.perfmodel.profiles.joined_layers import join_layers
from distconv.perfmodel.stages.devices import as_devices
from distconv.pipeline import Pipeline, PipelinePlan, possible_cuts
from distconv.plan import Plan, format_parts

CASES = {
    "resnet20": argparse.Namespace(model="resnet20", input=(3, 32, 32), batch=32, width=None, classes=10),
    "vgg11_bn": argparse.Namespace(model="vgg11_bn", input=(3, 32, 32), batch=32, width=16, classes=10),
}
"""Networks with the shapes of their mini-batches, as options of the commands that plan."""

CHOSEN = "explored"
WARM_UP, MEASUREMENTS = 1, 3
"""Warm-up steps in each measurement, and number of measurements. Each profiles the network, and then times steps."""

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv verify pipelines
  mpiexec -n 2 distconv verify pipelines --models resnet20 --batch 8 --rounds 3
"""


@dataclass(frozen=True)
class PipelineVariant:
    """One way to train: its name in the table, its choice with the predicted time, and the plan that is measured."""

    name: str
    choice: Choice
    plan: PipelinePlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv verify pipelines``."""
    parser.add_argument(
        "--rounds", type=positive_int, default=9, help="interleaved repetitions of each variant (default: %(default)s)"
    )
    parser.add_argument(
        "--models", default=",".join(CASES), help="networks, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive_int, help="samples per step (default: the model's in the table)")


def run(options: argparse.Namespace) -> int:
    """Profile, predict, measure, print. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DistconvError
        If a model is unknown, or there is one rank.
    """
    comm, names = MPI.COMM_WORLD, options.models.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise DistconvError(f"--models {unknown[0]}: there is no such network; there are {', '.join(CASES)}")
    if comm.size == 1:
        raise DistconvError("one rank has no pipeline; start it with mpiexec -n 2, or more")
    rows: list[AccuracyRow] = []
    network = profile_network(comm, CPU)
    for name in names:
        case = argparse.Namespace(**vars(CASES[name]), ranks=comm.size, memory=None, schedules=list(DEFAULT))
        case.batch = options.batch or case.batch
        rows += _time_interleaved(case, options.rounds, network, comm)
    if comm.rank == 0:
        _summarise(rows)
    return 0


# -- what is compared -------------------------------------------------------------------------------------------------


def _variants(case: argparse.Namespace, machine: Measurements) -> list[PipelineVariant]:
    """Return the plans that the search chooses, also per schedule, and other split points, micro-batches and grids."""
    model = build_network(case)
    cuts = possible_cuts(model)
    exploration = search_candidates(case, machine, cuts)
    asynchronous = argparse.Namespace(**{**vars(case), "schedules": ["pipedream"]})
    best = {
        CHOSEN: exploration.best,
        **{f"{s} explored": _best(exploration.table, s) for s in DEFAULT if s != PARALLEL},
        "pipedream explored": _best(search_candidates(asynchronous, machine, cuts).table, "pipedream"),
        "replicas": _best([choice for choice in exploration.table if choice.width == 1], PARALLEL),
    }
    priced = partial(_priced, case, machine, cuts)
    few, many = 2, min(case.batch, 4 * case.ranks)
    others = {
        "gpipe, early cut": priced("gpipe", many, share=0.25),
        "1f1b-sno, late cut": priced("1f1b-sno", many, share=0.75),
        "1f1b-so, few": priced("1f1b-so", few, share=0.5),
        "pipedream, early cut": priced("pipedream", 1, share=0.25),
        "samples": priced(PARALLEL, 1, share=0.0, plan=Plan({"*": {"n": case.ranks}}, case.ranks)),
        "rows": priced(PARALLEL, 1, share=0.0, plan=Plan({"*": {"h": case.ranks}}, case.ranks)),
    }
    choices = best | others
    return [
        PipelineVariant(name, choice, pipeline_plan(choice, model, case.model, case.batch))
        for name, choice in choices.items()
    ]


def _words(plan: PipelinePlan) -> str:
    """Return a plan in a line: schedule, micro-batches, cuts, replicas, grids."""
    words = [plan.schedule, f"m={plan.microbatches}", *(f"cut {cut}" for cut in plan.cuts)]
    words += [f"replicas {plan.replicas[0]}"] if plan.replicas[0] > 1 else []
    grids = sorted(
        {format_parts(parts) for each in plan.plans if isinstance(each, Plan) for parts in each.layers.values()}
    )
    return ", ".join(words + grids)


def _best(table: Sequence[Choice], schedule: str) -> Choice:
    return next(choice for choice in table if choice.schedule == schedule)


def _priced(
    case: argparse.Namespace,
    measured: Measurements,
    cuts: Sequence[str],
    schedule: str,
    microbatches: int,
    *,
    share: float,
    plan: Plan | None = None,
) -> Choice:
    """Predict a choice outside the search: a first stage with ``share`` of the blocks, or one stage with a plan."""
    width = 1 if plan is None else case.ranks
    size, machine = case.batch // microbatches, measured.machine
    if width == 1:
        profile = measured.profiles[size]
    else:
        profile = predicted_profile(graph_of(case, size), machine.at_work(case.ranks), plan, width)
    profile = join_layers(profile, cuts)
    count = case.ranks // width
    devices = [replace(each, memory=machine.memory_bytes) for each in as_devices(count, len(profile.layers))]
    setting = ExplorationContext(profile, machine, devices, 1, width, plan, measured.overheads)
    stages = setting.pipeline_candidate(schedule, 1, microbatches)
    assert stages is not None
    return make_choice(stages, _equal_cuts(stages, share))


def _equal_cuts(stages: PipelineCandidate, share: float) -> list[int]:
    """Return split points: the first stage has a fraction of the blocks, the others equal parts of the rest."""
    rest = stages.count - 1
    return round_to_layers([stages.size * (share + (1 - share) * index / rest) for index in range(rest)], stages.size)


# -- measuring --------------------------------------------------------------------------------------------------------


def _time_interleaved(
    case: argparse.Namespace, rounds: int, network: NetworkProfile, comm: MPI.Intracomm
) -> list[AccuracyRow]:
    """Profile the network, measure the choices of all profiles so far, interleaved, and print them. Collective."""
    known: list[Measurements] = []
    seconds: dict[str, list[float]] = {}
    count = min(MEASUREMENTS, rounds)
    for number in range(count):
        known.append(measure_once(case, network, comm))
        machine = combine_measurements(known)
        variants = run_on_rank_0(comm, partial(_variants, case, machine))
        # Each measurement is followed by its part of the rounds, so that a drift of the machine's speed affects both.
        share = rounds * (number + 1) // count - rounds * number // count
        for key, times in _measured(case, {repr(v.plan): v.plan for v in variants}, share, comm).items():
            seconds.setdefault(key, []).extend(times)
    rows = [AccuracyRow(case.model, v.name, _words(v.plan), v.choice.time, seconds[repr(v.plan)]) for v in variants]
    if comm.rank == 0:
        print(f"{case.model}, {case.batch} samples; {machine.overheads}")
        print_rows(rows)
    return rows


def _measured(
    case: argparse.Namespace, plans: Mapping[str, PipelinePlan], rounds: int, comm: MPI.Intracomm
) -> dict[str, list[float]]:
    """Return the seconds of ``rounds`` steps of each plan, interleaved. Collective."""
    torch.manual_seed(0)
    x, target = torch.randn(case.batch, *case.input), torch.randint(case.classes, (case.batch,))
    loss, optimizer = torch.nn.functional.cross_entropy, partial(torch.optim.SGD, lr=1e-6, momentum=0.9)
    pipes = {name: Pipeline.from_plan(plan, build_network(case), comm, loss, optimizer) for name, plan in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for number in range(WARM_UP + rounds):
        for name, pipe in pipes.items():
            seconds = pipeline_step_s(pipe, plans[name].schedule, x, target, comm)
            if number >= WARM_UP:
                times[name].append(seconds)
    for pipe in pipes.values():
        pipe.close()
    return times


# -- reporting --------------------------------------------------------------------------------------------------------


def _summarise(rows: Sequence[AccuracyRow]) -> None:
    print_accuracy(rows)
    for name in dict.fromkeys(row.model for row in rows):
        synchronous = [row for row in rows if row.model == name and "pipedream" not in row.name]
        best = min(synchronous, key=lambda row: row.measured)
        chosen = next(row for row in synchronous if row.name == CHOSEN)
        print(
            f"{name}: the choice ({chosen.what}) is {chosen.measured / best.measured - 1:+.1%} from the best measured "
            f"({best.name}) of the schedules with single-process results"
        )
