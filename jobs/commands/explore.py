"""Choose the stages, replicas, distributions and schedule of a pipeline, for the shortest predicted training step.

Compares data parallelism with pipelines: split points of the model, replicas, stages of several ranks with a
distribution of each layer, numbers of micro-batches, and schedules. Prints the candidates, fastest first, with
predicted time and memory, and writes the fastest to a file that ``distconv train classify --pipeline-plan`` and
``distconv.pipeline.Pipeline.from_plan`` run. ``--machine here`` measures this machine, its layers and overheads, on as
many ranks as will train.

``--devices`` is for ranks with several device types. SparsePipe's Algorithms 1 and 2 choose the stages of PipeDream's
schedule and the devices of each. Layer times come from profiles of each device type (``--profiles``, a folder that
``distconv profile --layers --devices`` has written) or from the device types of the machine file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import torch
from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.jobs.commands.profile import add_layer_times, combine_machines, measure_machine
from distconv.jobs.planning import chosen_pipeline, exploration_picture, mixed_devices, picture
from distconv.jobs.planning.options import (
    add_machine_argument,
    add_network_arguments,
    add_ranks_argument,
    build_network,
    check_writable,
    choose_rank_count,
    quantity_parser,
    run_on_rank_0,
    trace_network,
)
from distconv.jobs.planning.pipeline_overheads import assumed_overheads, measured_overheads
from distconv.jobs.planning.report import predicts_classes
from distconv.jobs.timing import CPU
from distconv.jobs.training.pipelines.options import add_devices_argument
from distconv.perfmodel import Exploration, LayerGraph, Machine, Profile, explore, time_layers
from distconv.perfmodel.exploration.candidate_stages import PARALLEL, Overheads
from distconv.perfmodel.exploration.choices import Choice
from distconv.perfmodel.machine.measure_links import NetworkProfile, profile_network
from distconv.perfmodel.machine.units import Memory
from distconv.perfmodel.stages.closed_forms import SCHEDULES
from distconv.pipeline import FAMILIES, PipelinePlan, SplitError, possible_cuts
from distconv.process import watchdog

EXAMPLES = """\
examples:
  distconv explore --model resnet20 --input 3,32,32 --batch 32 --ranks 4 --machine localhost --out pipeline.json
  distconv explore --model vgg16_bn --input 3,32,32 --batch 64 --ranks 3 --machine localhost --memory 500MB
  distconv explore --model unet --input 18,64,64 --batch 8 --ranks 4 --machine localhost --plot pipeline.png
  mpiexec -n 2 distconv explore --model resnet20 --input 3,32,32 --batch 32 --ranks 2 --machine here --out here.json
  mpiexec -n 4 distconv train classify --data cifar10 --model resnet20 --batch 32 --pipeline-plan pipeline.json
  distconv explore --model resnet20 --input 3,32,32 --batch 32 --devices titanxp:2,v100:2 --profiles layers \
      --machine localhost --out mixed.json
"""

HERE = "here"
WARM_UP, ITERATIONS, ROUNDS = 2, 4, 3
"""Warm-up steps and timed steps of the network, and number of repetitions of the measurement."""

MICROBATCHES_PER_RANK = 8
"""Maximum number of micro-batches per rank in the search. Beyond it, bubbles are small and passes short."""

RUNNABLE = (PARALLEL, *(name for name in SCHEDULES if not FAMILIES[name].hidden_transfers))
DEFAULT = ("dp", "gpipe", "1f1b-sno", "1f1b-so")
"""Schedules whose results equal those of a single process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv explore``."""
    add_network_arguments(parser)
    ranks = parser.add_mutually_exclusive_group(required=True)
    add_ranks_argument(ranks, required=False)
    add_devices_argument(ranks, "ranks that will train, by device type")
    add_machine_argument(parser, required=True, more=f"{HERE} (measure this machine now), ")
    parser.add_argument(
        "--memory",
        type=quantity_parser(Memory),
        metavar="16GB",
        help="memory limit of each rank, with its unit (default: the machine's)",
    )
    parser.add_argument(
        "--schedules",
        type=lambda text: text.split(","),
        metavar="NAME,NAME",
        help=f"schedules to compare, some of {', '.join(RUNNABLE)} (default: {','.join(DEFAULT)})",
    )
    parser.add_argument(
        "--profiles",
        type=Path,
        metavar="FOLDER",
        help="folder of layer profiles KIND.json, one for each device type; goes with --devices (default: times "
        "predicted from the machine file)",
    )
    parser.add_argument(
        "--method",
        choices=mixed_devices.METHODS,
        help="algorithm that chooses the stages; pipedream ignores differences between devices; goes with "
        "--devices (default: sparsepipe)",
    )
    parser.add_argument("--out", type=Path, metavar="PLAN.json", help="write the chosen plan to this file")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the compared candidates and the timeline of the chosen plan into this file (.png, .pdf, .svg)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure or load the machine, explore, print and write. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    run_on_rank_0(comm, lambda: _check(options))
    if options.devices is not None:
        run_on_rank_0(comm, lambda: _explore_device_types(options))
        return 0
    options.schedules = options.schedules or list(DEFAULT)
    if options.machine == HERE:
        measured = measure_here(options, options.ranks.count, comm)
    else:
        machine = run_on_rank_0(comm, lambda: Machine.load(options.machine))
        measured = Measurements(machine, assumed_overheads(machine), {})
    run_on_rank_0(comm, lambda: _explore(options, measured))
    return 0


def _check(options: argparse.Namespace) -> None:
    unknown = [name for name in options.schedules or () if name not in RUNNABLE]
    if unknown:
        raise DistconvError(f"--schedules {unknown[0]}: no such schedule. Use some of {', '.join(RUNNABLE)}.")
    _check_kinds(options)
    if options.out is not None:
        check_writable("--out", options.out)
    if options.plot is not None:
        check_writable("--plot", options.plot)
        picture.check_format(options.plot)


def _check_kinds(options: argparse.Namespace) -> None:
    """Check the options that require ``--devices`` or exclude it."""
    if options.devices is None:
        for name in ("profiles", "method"):
            if getattr(options, name) is not None:
                raise DistconvError(
                    f"--{name}: only an option of --devices, several device types. Add --devices or remove --{name}."
                )
        return
    if isinstance(options.devices, str):
        raise DistconvError(
            f"--devices {options.devices}: the number of ranks of each device type is missing. Give it, such "
            "as titanxp:2,v100:2."
        )
    for name, why in (
        ("schedules", f"stages of several device types use the schedule {mixed_devices.SCHEDULE}"),
        ("plot", "there is no figure of device types"),
    ):
        if getattr(options, name) is not None:
            raise DistconvError(f"--{name}: cannot be combined with --devices, since {why}. Remove --{name}.")
    if options.machine == HERE:
        raise DistconvError(
            f"--machine {HERE}: cannot be combined with --devices. Measure each device type with distconv "
            "profile --layers --devices, and name a machine for its links."
        )


# -- the search space -------------------------------------------------------------------------------------------------


def microbatch_counts(batch: int, ranks: int) -> list[int]:
    """Return the numbers of micro-batches that divide a mini-batch of ``batch`` samples, up to a limit.

    Parameters
    ----------
    batch : int
        Samples of a mini-batch.
    ranks : int

    Returns
    -------
    list of int
    """
    return [count for count in range(1, min(batch, MICROBATCHES_PER_RANK * ranks) + 1) if batch % count == 0]


def graph_of(options: argparse.Namespace, samples: int) -> LayerGraph:
    """Return the network's graph for a micro-batch of ``samples`` samples.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    samples : int

    Returns
    -------
    LayerGraph
    """
    return trace_network(argparse.Namespace(**{**vars(options), "batch": samples}))


@dataclass(frozen=True)
class Measurements:
    """Basis of a prediction: the machine, overheads of steps, and the network's measured layers.

    ``profiles`` are keyed by samples per micro-batch, measured on one rank while all ranks are busy. They are empty for
    a machine that is described but not measured.
    """

    machine: Machine
    overheads: Overheads
    profiles: Mapping[int, Profile]


def measure_here(options: argparse.Namespace, ranks: int, comm: MPI.Intracomm) -> Measurements:
    """Measure this machine and each layer, for every size of micro-batch and stage. Collective.

    Parameters
    ----------
    options : argparse.Namespace
        Options of ``distconv explore``.
    ranks : int
        Ranks that will train.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    Measurements
        Combination of several measurements.

    Raises
    ------
    DistconvError
        On all ranks, if ``comm`` does not have ``ranks`` ranks: a rank's speed depends on the number of working ranks.
    """
    if comm.size != ranks:
        raise DistconvError(
            f"--machine {HERE}: measures on the ranks that will train, but --ranks is {ranks} and this job "
            f"has {comm.size}. Start mpiexec -n {ranks}."
        )
    network = profile_network(comm, CPU)
    return combine_measurements([measure_once(options, network, comm) for _ in range(ROUNDS)])


def measure_once(options: argparse.Namespace, network: NetworkProfile, comm: MPI.Intracomm) -> Measurements:
    """Measure layers and overheads once, with known links. Collective.

    Layers on one rank are timed within the full network, distributed layers separately.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    network : NetworkProfile
        Links.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    Measurements
    """
    machine = measure_machine(HERE, network, comm, CPU)
    widths = [width for width in range(2, comm.size + 1) if comm.size % width == 0]
    sizes = [options.batch // count for count in microbatch_counts(options.batch, comm.size)]
    for size in sizes:
        graph = graph_of(options, size)
        machine = add_layer_times(machine, graph, widths, comm, CPU, busy_ranks=comm.size, rounds=1)
    model = build_network(options)
    with watchdog.waiting(lambda: "the start of a measurement"):
        comm.Barrier()
    # All ranks at once, since ranks of a node share its memory bandwidth in training, too.
    inputs = [torch.randn(size, *options.input) for size in sizes]
    own = [time_layers(model, [x], warm_up=WARM_UP, iterations=ITERATIONS).profile for x in inputs]
    with watchdog.waiting(lambda: "the profiles of all ranks"):
        of_ranks = comm.allgather(own)
    # Take the profile of the slowest rank, for which the others wait.
    profiles = {size: max(each, key=_seconds) for size, each in zip(sizes, zip(*of_ranks, strict=True), strict=True)}
    samples = torch.randn(2, *options.input)
    return Measurements(machine, measured_overheads(machine, build_network(options), samples, comm), profiles)


def combine_measurements(measurements: Sequence[Measurements]) -> Measurements:
    """Combine several measurements: the fastest profiles, as other load only lengthens times."""
    sizes = measurements[0].profiles
    profiles = {size: min((measurement.profiles[size] for measurement in measurements), key=_seconds) for size in sizes}
    differences = {
        name: statistics.median(getattr(measurement.overheads, name) for measurement in measurements)
        for name in ("pass_s", "message_s", "update_s_per_byte", "join_s")
    }
    overheads = replace(measurements[0].overheads, **differences)
    return Measurements(combine_machines([measurement.machine for measurement in measurements]), overheads, profiles)


def _seconds(profile: Profile) -> float:
    return sum(layer.time_s for layer in profile.layers)


def search_candidates(options: argparse.Namespace, measured: Measurements, cuts: list[str]) -> Exploration:
    """Search stages, schedules and distributions for ``options.ranks`` ranks and the options of the command.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    measured : Measurements
        Basis of the predictions.
    cuts : list of str
        Possible split points.

    Returns
    -------
    Exploration
    """
    return explore(
        cache(partial(graph_of, options)),
        measured.machine,
        options.ranks,
        options.batch,
        microbatches=microbatch_counts(options.batch, options.ranks),
        schedules=options.schedules,
        joint=True,
        memory=options.memory,
        cuts=cuts,
        overheads=measured.overheads,
        measured=measured.profiles,
    )


# -- the results -----------------------------------------------------------------------------------------------------


def _explore(options: argparse.Namespace, measured: Measurements) -> None:
    model, example = build_network(options), torch.empty(2, *options.input)
    try:
        cuts = possible_cuts(model, example)
    except SplitError as error:
        print(f"no stages: {error}")
        cuts = []
    if options.machine == HERE:
        # Measured with these ranks busy: the times do not hold for fewer ranks.
        ranks, remark = options.ranks.count, ""
        exploration = search_candidates(_with_ranks(options, ranks), measured, cuts)
    else:
        ranks, exploration, remark = choose_rank_count(
            lambda count: search_candidates(_with_ranks(options, count), measured, cuts), options.ranks
        )
    options = _with_ranks(options, ranks)
    plan = chosen_pipeline.pipeline_plan(exploration.best, model, options.model, options.batch, example)
    print(f"{options.model}, samples of {' x '.join(map(str, options.input))}, {len(cuts)} possible split points")
    print(f"counted {measured.overheads}")
    print(exploration.explain())
    for line in _stages(exploration.best, plan):
        print(line)
    if remark:
        print(remark)
    if options.out is not None:
        plan.save(options.out)
        print(f"plan: {options.out}; train with it: {_training_command(options)}")
    if options.plot is not None:
        exploration_picture.draw(options.plot, exploration)
        print(f"figure: {options.plot}")


def _explore_device_types(options: argparse.Namespace) -> None:
    """Partition the network over several device types, print and write."""
    machine, kinds = Machine.load(options.machine), options.devices
    if options.profiles is not None:
        profiles = mixed_devices.load_profiles(options.profiles, kinds)
    else:
        profiles = mixed_devices.predict_profiles(graph_of(options, options.batch), machine, kinds)
    cuts = possible_cuts(build_network(options), torch.empty(2, *options.input))
    setting = mixed_devices.combine_profiles(kinds, machine, profiles, cuts, options.memory)
    method = options.method or mixed_devices.METHODS[0]
    stages = setting.choose_stages(method)
    print(f"{options.model}, {options.batch} samples of {' x '.join(map(str, options.input))}, by {method}")
    for line in mixed_devices.report_lines(setting, method, stages):
        print(line)
    plan = mixed_devices.to_pipeline_plan(stages, options.model, options.batch)
    there = ",".join(f"{kind}:{count}" for kind, count in kinds.items())
    if options.out is not None:
        plan.save(options.out)
        command = _training_command(_with_ranks(options, plan.ranks))
        print(f"plan: {options.out}; train with it: {command} --devices {there}")


def _with_ranks(options: argparse.Namespace, ranks: int) -> argparse.Namespace:
    return argparse.Namespace(**vars(options) | {"ranks": ranks})


def _stages(choice: Choice, plan: PipelinePlan) -> Iterator[str]:
    """Yield lines with the layers, times and memory of each stage, and grids if it has several ranks."""
    ends = ["the input", *plan.cuts, "the output"]
    costs = choice.costs
    for index, (begin, end) in enumerate(pairwise(ends)):
        yield (
            f"stage {index}, {begin} to {end}: forward {1e3 * costs.forward[index]:.3f} ms, backward "
            f"{1e3 * costs.backward[index]:.3f} ms a micro-batch, {choice.memory[index] / 1e9:.3g} GB"
        )
        grids = plan.plans[index]
        if grids is not None:
            yield f"  {grids}"


def _training_command(options: argparse.Namespace) -> str:
    if not predicts_classes(graph_of(options, 2)):
        return f"distconv.pipeline.Pipeline.from_plan({str(options.out)!r}, ...)"
    width = f" --width {options.width}" if options.width else ""
    classes = f" --classes {options.classes}" if options.classes else ""
    return (
        f"mpiexec -n {options.ranks} distconv train classify --data PATH --model {options.model}{width}{classes} "
        f"--batch {options.batch} --pipeline-plan {options.out}"
    )
