"""One run: from an initial condition to the samples that are accepted.

The run is looked at every tau / 4. A candidate at time t is labelled by what happens up to t + tau::

    time     0    tau/4   tau/2            tau   5/4 tau
    records  |-- 0 --|-- 1 --|-- 2 --|-- 3 --|-- 4 --|      smallest Jacobian of each cell over the interval, every step
    windows  |------------ of 0 -------------|
                     |------------ of 1 -------------|
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from distconv.jobs.mesh.hydro.cell_geometry import lower_to_minimum_jacobian
from distconv.jobs.mesh.hydro.initial_conditions import initial_condition
from distconv.jobs.mesh.hydro.solver import Hydro, RunStopped
from distconv.jobs.mesh.hydro.state import HydroState
from distconv.jobs.mesh.recipe import TAU

from .channels import Singles, extrapolated_jacobian, sample_channels

__all__ = ["Criteria", "LabelledSnapshot", "RunResult", "perform_run", "run_seed"]


LOOKS = 4
"""Candidates per horizon.

A mesh that degrades shortens the time step, so that the end of a run costs most; candidates that lie close share it.
"""


@dataclass(frozen=True)
class Criteria:
    """What a label is, and which snapshots are accepted.

    A cell is labelled if its smallest scaled corner Jacobian falls below ``threshold`` within ``tau``. A snapshot
    counts if less than ``most_bad`` of the cells are below ``bad`` now and at least ``least_labelled`` are labelled; a
    run gives ``per_run`` snapshots at most and ends at ``last_time`` if it has not degraded by then.
    """

    tau: float = TAU
    threshold: float = 0.4
    bad: float = 0.25
    most_bad: float = 0.03
    least_labelled: float = 0.01
    per_run: int = 2
    last_time: float = 2.0


@dataclass(frozen=True)
class LabelledSnapshot:
    """An accepted snapshot: ``channels`` (18, H, W), ``label`` and ``extrapolated`` (H, W)."""

    channels: Singles
    label: npt.NDArray[np.uint8]
    extrapolated: Singles
    time: float
    step: int
    positives: float
    inversions: int


@dataclass
class RunResult:
    """The accepted snapshots of a run in order of time, and how many candidates were rejected and why.

    ``degraded``: too many bad cells already; ``quiet``: too few labelled; ``unfinished``: the run ended before the
    label was complete.
    """

    samples: list[LabelledSnapshot] = field(default_factory=list)
    degraded: int = 0
    quiet: int = 0
    unfinished: int = 0
    steps: int = 0
    end_time: float = 0.0
    ending: str = ""


@dataclass(frozen=True)
class Candidate:
    """A snapshot with the record of what follows it; without a state if too many cells are bad already."""

    state: HydroState | None
    time: float
    step: int
    record: Singles


def run_seed(seed: int, split: int, family: int, index: int) -> np.random.SeedSequence:
    """Seed of a run: runs of different splits, families or indices are independent, whatever else is generated."""
    return np.random.SeedSequence(seed, spawn_key=(split, family, index))


def perform_run(
    family: str,
    size: int,
    seed: np.random.SeedSequence,
    criteria: Criteria = Criteria(),
    watch: Callable[[Hydro], None] | None = None,
) -> RunResult:
    """Run one initial condition until its first snapshots that qualify are complete, or the mesh degrades.

    The first ones show what is about to happen; later ones mostly what has happened. ``watch`` is called after every
    step.
    """
    hydro = Hydro(initial_condition(family, size, seed))
    result = RunResult()
    accepted: list[Candidate] = []
    pending: deque[Candidate] = deque()
    result.ending = "last time"
    for index in range(round(LOOKS * criteria.last_time / criteria.tau)):
        pending.append(look(hydro, criteria))
        result.degraded += pending[-1].state is None
        if all(candidate.state is None for candidate in pending):
            result.ending = "the mesh has degraded"
            break
        try:
            advance(hydro, criteria.tau * (index + 1) / LOOKS, [candidate.record for candidate in pending], watch)
        except RunStopped as stop:
            result.ending = str(stop)
            result.unfinished = sum(candidate.state is not None for candidate in pending)
            break
        if len(pending) < LOOKS:
            continue
        complete = pending.popleft()
        if complete.state is not None:
            if float(np.mean(complete.record < criteria.threshold)) < criteria.least_labelled:
                result.quiet += 1
            else:
                accepted.append(complete)
        if len(accepted) == criteria.per_run:
            result.ending = "enough snapshots"
            break
    result.steps, result.end_time = hydro.steps, hydro.time
    result.samples = [finish(hydro, candidate, criteria) for candidate in accepted]
    return result


def look(hydro: Hydro, criteria: Criteria) -> Candidate:
    """The candidate of this moment."""
    record = np.full(hydro.gas.mass.shape, 2.0, np.float32)
    lower_to_minimum_jacobian(hydro.state.x, hydro.state.y, record)
    sound = float(np.mean(record < criteria.bad)) < criteria.most_bad
    return Candidate(hydro.state.copy() if sound else None, hydro.time, hydro.steps, record)


def advance(hydro: Hydro, end: float, records: list[Singles], watch: Callable[[Hydro], None] | None) -> None:
    """Advance to time ``end``, lowering ``records`` to the smallest Jacobian of each cell at every step."""
    here = np.full_like(records[0], 2.0)
    while hydro.time < end:
        hydro.step(end)
        lower_to_minimum_jacobian(hydro.state.x, hydro.state.y, here)
        if watch is not None:
            watch(hydro)
    for record in records:
        np.minimum(record, here, out=record)


def finish(hydro: Hydro, candidate: Candidate, criteria: Criteria) -> LabelledSnapshot:
    """The sample of an accepted candidate."""
    assert candidate.state is not None
    label = (candidate.record < criteria.threshold).astype(np.uint8)
    return LabelledSnapshot(
        channels=sample_channels(candidate.state, hydro.gas, hydro.coefficients),
        label=label,
        extrapolated=extrapolated_jacobian(candidate.state, criteria.tau),
        time=candidate.time,
        step=candidate.step,
        positives=float(np.mean(label)),
        inversions=int(np.count_nonzero(candidate.record <= 0.0)),
    )
