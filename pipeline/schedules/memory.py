"""Memory and weight staleness of a schedule, from its lists without times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .actions import Kind, Schedule, ScheduleError
from .per_stage import Cost, per_stage


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of a stage.

    Attributes
    ----------
    in_flight : float
        Micro-batches whose F has begun and whose last gradient is not computed. On each of C chunks a micro-batch
        counts 1 / C, because the chunk keeps that fraction of the stage's activations.
    versions : int
        Copies of the weights, the newest included.
    """

    in_flight: float
    versions: int


def peak_memory(schedule: Schedule) -> list[StageMemory]:
    """Return the peak of each stage with one replica, for any costs.

    Parameters
    ----------
    schedule : Schedule

    Returns
    -------
    list of StageMemory

    Examples
    --------
    >>> from distconv.pipeline import schedule
    >>> peak_memory(schedule("1f1b-sno", 2, 8))
    [StageMemory(in_flight=2.0, versions=1), StageMemory(in_flight=1.0, versions=1)]
    """
    return [
        StageMemory(_in_flight(schedule, stage), _versions(schedule, stage)) for stage in range(len(schedule.stages))
    ]


def staleness(schedule: Schedule) -> list[int]:
    """Return for each stage the most updates between the weights of a forward and those that its gradient changes.

    The value is 0 for synchronous schedules, and zero or less if weights were predicted.

    Source: Zhang, Abdelrahman 2021 (stale weights), 4.1, degree of staleness.

    Parameters
    ----------
    schedule : Schedule

    Returns
    -------
    list of int
    """
    ages = []
    for actions in schedule.stages:
        # By mini-batch: the version that its forward reads, and the one to which its gradient is added. An UPDATE has
        # the number of the version that it makes. That of a synchronous schedule has no mini-batch, hence no gap.
        used = {a.microbatch: a.version or 0 for a in actions if a.kind is Kind.F}
        changed = {a.microbatch: (a.version or 0) - 1 for a in actions if a.kind is Kind.UPDATE}
        ages.append(max((changed[m] - version for m, version in used.items() if m in changed), default=0))
    return ages


def stale_fraction(schedule: Schedule, weights: Cost) -> float:
    """Return the fraction of all weights that are on stages with stale weights.

    Source: Zhang, Abdelrahman 2021 (stale weights), 4.1, percentage of stale weights.

    Parameters
    ----------
    schedule : Schedule
    weights : float or sequence of float
        Number of weights of each stage.

    Returns
    -------
    float

    Raises
    ------
    ScheduleError
        If no stage has weights.
    """
    counts: Sequence[float] = per_stage("weights", weights, len(schedule.stages))
    if not sum(counts):
        raise ScheduleError("weights: the stages have none; give at least one stage a number above zero")
    return sum(count for count, gap in zip(counts, staleness(schedule), strict=True) if gap) / sum(counts)


def _in_flight(schedule: Schedule, stage: int) -> float:
    """Return the most micro-batches whose F has begun and whose last gradient is not computed."""
    last = Kind.W if schedule.splits_backward else Kind.B  # W needs the activations that B has used
    count = peak = 0
    for action in schedule.stages[stage]:
        count += action.kind is Kind.F
        peak = max(peak, count)
        count -= action.kind is last
    return peak / schedule.chunks


def _versions(schedule: Schedule, stage: int) -> int:
    """Return the newest, the stashed and, while a pass uses them, the predicted weights."""
    stashed: set[int | None] = set()
    peak = 1
    for action in schedule.stages[stage]:
        if action.kind is Kind.STASH:
            stashed.add(action.microbatch)
        peak = max(peak, 1 + len(stashed) + (action.kind is Kind.PREDICT))
        # Known schedules with W have one version, so B is the last pass that reads a stashed version.
        if action.kind is Kind.B:
            stashed.discard(action.microbatch)
    return peak
