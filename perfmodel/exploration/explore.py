"""``explore``: data parallelism or a pipeline, and the schedule, split points and number of micro-batches.

::

    devices:  R pipelines of N stages each: stage i of all of them has the same layers
              R = 1: BaPipe's daisy chain;  N = 1: data parallelism ("dp")

The time of a combination is the closed form of :mod:`distconv.perfmodel.stages.closed_forms`, plus the part of the
gradient all-reduce over the R replicas that does not overlap. The fastest combination that fits the memory is the
result. A device here may be one rank or, with ``joint``, a group of ranks. The names of schedules are those of
:func:`distconv.pipeline.schedule`.

BaPipe considers R = 1 and data parallelism. ``joint`` considers every R that divides the devices, and chooses the split
points for the time and memory of each schedule (:mod:`distconv.perfmodel.exploration.cuts`). Given layer graphs, it
also considers stages of g ranks (R N g in total), over which each layer has the distribution that ``select`` finds for
g ranks. R and g are the same for all stages, because the closed forms require it.

Source: Zhao et al. 2020 (BaPipe), 3.2, 3.3, Tables I and II.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from distconv.parameters.channel_split import divisors
from distconv.perfmodel.exploration.candidate_stages import (
    PARALLEL,
    ExplorationContext,
    Overheads,
    PipelineCandidate,
    round_to_layers,
)
from distconv.perfmodel.exploration.choices import Choice, Exploration, ExplorationError, StageCosts
from distconv.perfmodel.exploration.cuts import balanced_cuts, best_cuts, least_memory_cuts
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.joined_layers import join_layers
from distconv.perfmodel.profiles.layer_profile import Profile
from distconv.perfmodel.profiles.predicted_profile import is_estimated, predicted_profile, scale_profile
from distconv.perfmodel.stages.closed_forms import SCHEDULES
from distconv.perfmodel.stages.devices import Device, as_devices, check_positive, is_integer
from distconv.perfmodel.strategy.selection import select
from distconv.plan import Plan
from distconv.text_files import shorten

SYNCHRONOUS = (PARALLEL, "1f1b-sno", "1f1b-so")
"""Schedules for accelerators that alternate between computation and communication, such as GPUs.

BaPipe calls their execution synchronous. All schedules of both tuples update once per mini-batch.
"""

ASYNCHRONOUS = (PARALLEL, "1f1b-as", "fbp-as")
"""Schedules for accelerators that pass results on while they compute them, such as FPGAs."""


def explore(
    profile: Profile | Callable[[int], Profile | LayerGraph],
    machine: Machine | str | os.PathLike[str],
    devices: int | Sequence[Device],
    batch: int,
    *,
    samples: int | None = None,
    microbatches: int | Sequence[int] | None = None,
    schedules: str | Sequence[str] = SYNCHRONOUS,
    joint: bool = False,
    share_layers: bool = False,
    memory: float | None = None,
    optimizer_slots: int = 1,
    cuts: Sequence[str] | None = None,
    overheads: Overheads | None = None,
    measured: Mapping[int, Profile] | None = None,
) -> Exploration:
    """Find the fastest way to train a mini-batch on all devices: data parallelism or a pipeline.

    Source: Zhao et al. 2020 (BaPipe), 3.2, 3.3, Tables I and II.

    Parameters
    ----------
    profile : Profile, or callable
        Profile of ``samples`` samples. Profiles of micro-batches of other sizes are scaled from it in proportion, as
        are the ``times`` of devices. Or a function that returns, for a number of samples, the Profile or the
        :class:`LayerGraph` of such a micro-batch.
    machine : Machine, str or path
        Links and memory; a name or file is loaded.
    devices : int or sequence of Device
        Number of equal devices, or kinds in the order of the pipeline.
    batch : int
        Samples of the mini-batch.
    samples : int, optional
        Samples of ``profile``. Default: ``batch``.
    microbatches : int or sequence of int, optional
        Numbers of micro-batches to consider. Default: all divisors of ``batch``.
    schedules : str or sequence of str
        ``"dp"`` and names from ``closed_forms.SCHEDULES``.
    joint : bool
        True to consider replicated pipelines, stages of several ranks, and split points for each schedule. Otherwise
        the search is BaPipe's.
    share_layers : bool
        True if a layer at a split point may be divided between two stages (BaPipe, 3.3.2), which FPGAs support and
        ``distconv.pipeline.Pipeline`` does not. Otherwise layers stay intact.
    memory : float, optional
        Bytes of a device. Default: the machine's.
    optimizer_slots : int
        Tensors of optimizer state per parameter. BaPipe's memory of 2w corresponds to 0.
    cuts : sequence of str, optional
        Layers at which a stage may begin, such as ``distconv.pipeline.possible_cuts`` returns. Default: any.
    overheads : Overheads, optional
        Time of a step beyond its layers and links, the optimizer's included. Default: none.
    measured : mapping of int to Profile, optional
        Measured profiles of micro-batches on one rank, by their number of samples. They replace predictions from
        graphs.

    Returns
    -------
    Exploration
        The fastest choice, and all others.

    Raises
    ------
    ExplorationError
        If an argument is invalid, or no combination fits the memory; the message names the one that needs the least.
    PartitionError
        If the devices are invalid.
    """
    schedules = [schedules] if isinstance(schedules, str) else schedules
    microbatches = [microbatches] if isinstance(microbatches, int) else microbatches
    _check_profile(profile, devices)
    _check_search(batch, schedules, optimizer_slots, microbatches)
    machine = machine if isinstance(machine, Machine) else Machine.load(machine)
    profile_samples = batch if samples is None else _check_positive_count("samples", samples)
    limit = machine.memory_bytes if memory is None else check_positive(memory, "explore: memory", "bytes")
    choices: list[Choice] = []
    context = None
    # For each number of micro-batches and each width of a stage: 1. a profile; 2. the devices; 3. all schedules.
    for count in divisors(batch) if microbatches is None else sorted(set(microbatches)):
        size = batch // count
        fraction = 1.0 if callable(profile) else size / profile_samples
        profiled = profile(size) if callable(profile) else scale_profile(profile, fraction)
        for width in _stage_widths(profiled, devices) if joint else [1]:
            # Measured times of the full network on one rank are better than a prediction from its operations.
            if width == 1 and measured and size in measured:
                layers, plan, estimated = measured[size], None, False
            else:
                layers, plan, estimated = _profile_on_ranks(profiled, machine, width, devices)
            layers = layers if cuts is None else join_layers(layers, cuts)
            groups = devices // width if is_integer(devices) else devices
            kinds = _scaled_devices(as_devices(groups, len(layers.layers)), fraction, limit)
            context = ExplorationContext(
                layers, machine, kinds, optimizer_slots, width, plan, overheads or Overheads(), estimated
            )
            choices += _choices(context, schedules, count, joint, share_layers)
    # At least one number of micro-batches was considered, and the message of an error needs its context.
    assert context is not None
    return _rank_choices(choices, context, batch)


def _stage_widths(profiled: Profile | LayerGraph, devices: int | Sequence[Device]) -> list[int]:
    """Return the numbers of ranks that a stage can have: more than one for graphs on equal devices only."""
    if not isinstance(profiled, LayerGraph) or not is_integer(devices) or devices < 1:
        return [1]
    return divisors(int(devices))


def _profile_on_ranks(
    profiled: Profile | LayerGraph, machine: Machine, width: int, devices: int | Sequence[Device]
) -> tuple[Profile, Plan | None, bool]:
    """Return the profile of a micro-batch on ``width`` ranks, its plan, and if it is estimated. All devices compute.

    If the machine has measured some of the layers only, its roofline estimates all of them.
    """
    if isinstance(profiled, Profile):
        return profiled, None, False
    # A stage of few ranks shares its node with the other stages, which slow it down.
    machine = machine.at_work(sum(device.count for device in as_devices(devices, 0)))
    plan = select(profiled, machine, width).plan if width > 1 else None
    estimated = is_estimated(profiled, machine, plan, width)
    if estimated:
        machine = machine.by_roofline()
        plan = select(profiled, machine, width).plan if width > 1 else None
    return predicted_profile(profiled, machine, plan, width), plan, estimated


def _rank_choices(choices: Sequence[Choice], context: ExplorationContext, batch: int) -> Exploration:
    total = context.ranks
    question = f"{batch} samples on {total} devices of {context.machine.name}"
    if not choices:
        raise ExplorationError(
            f"explore: {question}: no number of micro-batches is possible with these schedules. Data parallelism needs "
            f"a multiple of {total}, a pipeline at least {total} layers (there are {len(context.profile.layers)})"
        )
    # Choices that fit come first, and of these the measured ones: a roofline often underestimates a measured time.
    table = tuple(sorted(choices, key=lambda each: (not each.fits, each.estimated, each.time, max(each.memory))))
    limit = min(device.memory for device in context.devices if device.memory is not None)
    if not table[0].fits:
        least = min(table, key=lambda choice: max(choice.memory))
        raise ExplorationError(
            f"explore: {question}: no choice fits into {limit:.0f} bytes per device. The smallest, {least.schedule} "
            f"with {least.microbatches} micro-batches, needs {max(least.memory):.0f} bytes"
        )
    return Exploration(table[0], table, limit, question)


def _choices(
    context: ExplorationContext, schedules: Sequence[str], microbatches: int, joint: bool, share_layers: bool
) -> Iterator[Choice]:
    total = sum(device.count for device in context.devices)
    for schedule in schedules if total > 1 else [PARALLEL]:
        # Numbers of replicas. Each of them gets the same number of micro-batches.
        if schedule == PARALLEL:
            numbers = [total] if microbatches % total == 0 else []
        elif SCHEDULES[schedule].endless:  # a mini-batch is one pass
            numbers = [1] if microbatches == 1 else []
        else:
            counts = [r for r in divisors(total) if r < total] if joint else [1]
            numbers = [r for r in counts if microbatches % r == 0]
        for replicas in numbers:
            stages = context.pipeline_candidate(schedule, replicas, microbatches)
            if stages is not None:
                yield from _choices_of_stages(stages, joint, share_layers)


def _choices_of_stages(stages: PipelineCandidate, joint: bool, share_layers: bool) -> Iterator[Choice]:
    """Yield BaPipe's choice, and with ``joint`` the result of the search."""
    tried: list[Sequence[float]] = []
    if stages.count == 1:
        tried.append(())
    elif stages.replicas == 1:
        positions = _balanced_positions(stages)
        tried.append(positions if share_layers else round_to_layers(positions, stages.size))
    if joint and stages.count > 1:
        tried.append(best_cuts(stages, tried))
    for positions in tried:
        yield make_choice(stages, positions)


def make_choice(stages: PipelineCandidate, positions: Sequence[float]) -> Choice:
    """Return the choice with these split points.

    Parameters
    ----------
    stages : PipelineCandidate
        Pipelines to split.
    positions : sequence of float
        Split points in layers.

    Returns
    -------
    Choice
        With its time and memory.
    """
    context, memory = stages.context, stages.memory(positions)
    # On the devices of the first replica.
    forward, backward, transfer = stages.costs(positions, context.kinds[: stages.count])
    return Choice(
        stages.schedule,
        stages.partition(positions),
        stages.microbatches,
        stages.replicas,
        stages.time(positions),
        memory,
        all(needed <= limit for needed, limit in zip(memory, stages.memory_limits, strict=True)),
        StageCosts(tuple(forward), tuple(backward), tuple(transfer), tuple(stages.update_times(positions))),
        context.width,
        context.plan,
        context.estimated,
    )


def _balanced_positions(stages: PipelineCandidate) -> Sequence[float]:
    """Return BaPipe's split points, or others if a stage exceeds its memory.

    These are the most balanced ones that fit, or else those that come closest to fitting.
    """
    free = stages.context.balanced_partition
    if all(needed <= limit for needed, limit in zip(stages.memory(free.positions), stages.memory_limits, strict=True)):
        return free.positions
    return balanced_cuts(stages) or least_memory_cuts(stages)


def _scaled_devices(devices: Sequence[Device], fraction: float, memory: float) -> list[Device]:
    return [
        Device(
            device.name,
            device.count,
            None if device.times is None else [fraction * time for time in device.times],
            memory if device.memory is None else device.memory,
        )
        for device in devices
    ]


def _check_positive_count(name: str, samples: int) -> int:
    if type(samples) is not int or samples < 1:
        raise ExplorationError(f"explore: found {name}={samples!r}, expected a positive whole number of samples")
    return samples


def _check_profile(profile: object, devices: int | Sequence[Device]) -> None:
    if not callable(profile) and not isinstance(profile, Profile):
        raise ExplorationError(
            f"explore: found {shorten(repr(profile))}, expected a Profile or a function that returns one"
        )
    own_times = isinstance(devices, Sequence) and any(getattr(each, "times", None) is not None for each in devices)
    if callable(profile) and own_times:
        raise ExplorationError(
            "explore: devices with their own times require a Profile, not a function that returns one. Pass a Profile"
        )


def _check_search(batch: int, schedules: Sequence[str], slots: int, microbatches: Sequence[int] | None) -> None:
    _check_positive_count("batch", batch)
    unknown = [name for name in schedules if name != PARALLEL and name not in SCHEDULES]
    if unknown or not schedules:
        raise ExplorationError(
            f"explore: found schedules={list(schedules)!r}, expected some of {', '.join((PARALLEL, *SCHEDULES))}"
        )
    if type(slots) is not int or slots < 0:
        raise ExplorationError(f"explore: found optimizer_slots={slots!r}, expected 0 or more")
    for count in () if microbatches is None else microbatches:
        if type(count) is not int or count < 1 or batch % count:
            raise ExplorationError(f"explore: found {count!r} micro-batches, expected a divisor of {batch} samples")
    if microbatches is not None and not microbatches:
        raise ExplorationError("explore: found no number of micro-batches, expected at least one or None")
