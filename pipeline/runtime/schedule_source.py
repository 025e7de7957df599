"""Source of a pipeline's actions: a schedule for each number of micro-batches, or a steady stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from distconv.pipeline.schedules.actions import Schedule, ScheduleError
from distconv.pipeline.schedules.registry import FAMILIES, check_count, schedule
from distconv.pipeline.schedules.steady_state import SteadyStream
from distconv.pipeline.schedules.validation import validate


@dataclass(frozen=True)
class ScheduleSource:
    """Source of a pipeline's actions.

    Attributes
    ----------
    microbatches : int
        Most micro-batches of a mini-batch.
    make : callable
        ``make(m)`` returns the schedule of a mini-batch of m micro-batches.
    stream : SteadyStream or None
        Actions of an asynchronous schedule, step by step.
    begins : Schedule
        A schedule of the same family, weights and options, from which :meth:`.Executor.begin` takes the properties that
        do not depend on the number of micro-batches.
    """

    microbatches: int
    make: Callable[[int], Schedule]
    stream: SteadyStream | None
    begins: Schedule


def resolve_schedule(
    given: str | Schedule,
    stages: int,
    replicas: Sequence[int],
    *,
    microbatches: int,
    weights: str | None,
    options: Mapping[str, Any],
) -> ScheduleSource:
    """Return the source of actions for a schedule or its name.

    A schedule that :func:`schedule` made can be made again for other numbers of micro-batches. Any other schedule is
    used unchanged.

    Parameters
    ----------
    given : str or Schedule
    stages : int
        Number of stages.
    replicas : sequence of int
        Replicas of each stage.
    microbatches : int
        Most micro-batches of a mini-batch. For a Schedule object, 1 stands for the number of the object.
    weights : str or None
        Weight policy.
    options : mapping
        Options of the schedule.

    Returns
    -------
    ScheduleSource

    Raises
    ------
    ScheduleError
        If the schedule cannot be run.
    """
    microbatches = check_count(_name(given), "microbatches", microbatches)
    settings = dict(options) | ({} if weights is None else {"weights": weights})
    if isinstance(given, Schedule):
        _check_given(given, stages, replicas, settings)
        settings = given.options | settings
    order_of = _action_maker(given, stages, replicas, settings)
    # Properties that do not depend on the number of micro-batches are read from any schedule of the source.
    first = order_of(given.microbatches if isinstance(given, Schedule) else 1)
    if first.concurrent:
        raise ScheduleError(
            f"{first.name}: forward and backward at the same time can be simulated, not run on one rank"
        )
    if not first.asynchronous:
        count = first.microbatches if isinstance(given, Schedule) and microbatches == 1 else microbatches
        return ScheduleSource(count, order_of, None, first)
    if microbatches > 1:
        raise ScheduleError(
            f"{first.name}: microbatches={microbatches}, but it updates after every mini-batch; pass "
            "microbatches=1 and smaller mini-batches"
        )
    if first.replicas != tuple(replicas):
        raise ScheduleError(f"{first.name} has no replicas; give every stage one rank, or use pipedream")
    stream = SteadyStream(first.name, stages, **_with_replicas(first.name, replicas, settings))
    return ScheduleSource(1, order_of, stream, stream.schedule)


def count_chunks(given: str | Schedule, options: Mapping[str, Any]) -> int:
    """Return the number of modules on each rank.

    Parameters
    ----------
    given : str or Schedule
    options : mapping
        Options of the schedule.

    Returns
    -------
    int
    """
    if isinstance(given, Schedule):
        return given.chunks
    family = FAMILIES.get(given)
    if family is None or "chunks" not in family.options:
        return 1
    return schedule(given, 1, 1, **{key: value for key, value in options.items() if key == "chunks"}).chunks


def _name(given: str | Schedule) -> str:
    return given.name if isinstance(given, Schedule) else given


def _with_replicas(name: str, replicas: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a schedule, with the pipeline's replicas if they are an option of it."""
    family = FAMILIES.get(name)
    if "switch_after" in options:
        raise ScheduleError(f"{name}: switch_after applies to simulations only; call switch() instead")
    return {**options, "replicas": tuple(replicas)} if family and "replicas" in family.options else dict(options)


def _check_given(given: Schedule, stages: int, replicas: Sequence[int], options: Mapping[str, Any]) -> None:
    validate(given)
    if len(given.stages) != stages:
        raise ScheduleError(f"{given.name}: a schedule of {len(given.stages)} stages, but there are {stages}")
    if given.asynchronous and given.replicas != tuple(replicas):
        raise ScheduleError(
            f"{given.name}: a schedule for replicas {list(given.replicas)}, but there are {list(replicas)}"
        )
    if options:
        raise ScheduleError(
            f"{given.name}: {', '.join(options)} cannot be applied to a Schedule object; pass them to schedule()"
        )


def _action_maker(
    given: str | Schedule, stages: int, replicas: Sequence[int], options: Mapping[str, Any]
) -> Callable[[int], Schedule]:
    """Return a function that returns the schedule for a number of micro-batches."""
    name = _name(given)
    if isinstance(given, str) or name in FAMILIES:
        settings = _with_replicas(name, replicas, options)
        # Cached: every step asks for its schedule, and mini-batches have few different sizes.
        by_name: Callable[[int], Schedule] = lru_cache(maxsize=None)(lambda m: schedule(name, stages, m, **settings))
        # A Schedule object with the name of a family may have been edited; its actions then hold as they are.
        if isinstance(given, str) or by_name(given.microbatches) == given:
            return by_name
    if given.asynchronous:
        raise ScheduleError(
            f"{name}: an asynchronous Schedule object has a fixed number of mini-batches, but training has not; "
            "pass the schedule's name"
        )

    def check_and_return(microbatches: int) -> Schedule:
        if microbatches != given.microbatches:
            raise ScheduleError(
                f"{name}: a schedule of {given.microbatches} micro-batches cannot run {microbatches}; every mini-batch "
                "needs at least as many samples"
            )
        return given

    return check_and_return
