"""One run: from an initial condition to accepted samples.

A candidate snapshot is taken every tau / 4. A candidate at time t is labelled from the mesh in [t, t + tau]::

    time     0    tau/4   tau/2            tau   5/4 tau
    records  |-- 0 --|-- 1 --|-- 2 --|-- 3 --|-- 4 --|      smallest Jacobian of each cell over the interval, every step
    windows  |------------ of 0 -------------|
                     |------------ of 1 -------------|

The module is independent of ranks and files. A run depends on family, size, seed and criteria alone.
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
"""Candidates per time horizon.

A mesh that degrades shortens the time step, so the end of a run is its most expensive part. The windows of candidates
that lie close together overlap and share its cost.
"""


@dataclass(frozen=True)
class Criteria:
    """Definition of labels, and conditions for accepting a snapshot.

    Parameters
    ----------
    tau : float
        Time horizon of the labels.
    threshold : float
        A cell is labelled if its smallest scaled corner Jacobian falls below this value within ``tau``.
    bad : float
        A cell whose smallest Jacobian is below this value is bad.
    most_bad : float
        A snapshot is accepted only if the fraction of bad cells is smaller.
    least_labelled : float
        A snapshot is accepted only if at least this fraction of the cells is labelled.
    per_run : int
        Largest number of snapshots of a run.
    last_time : float
        Time at which a run ends unless the mesh has degraded before.
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
    """An accepted snapshot.

    Attributes
    ----------
    channels : ndarray of float32, shape (18, H, W)
        The channels.
    label : ndarray of uint8, shape (H, W)
        1 where the cell is labelled.
    extrapolated : ndarray of float32, shape (H, W)
        Smallest Jacobian over tau if all nodes kept their velocity.
    time, step
        Time and step of the run.
    positives : float
        Fraction of labelled cells.
    inversions : int
        Number of cells whose smallest Jacobian within tau is not positive.
    """

    channels: Singles
    label: npt.NDArray[np.uint8]
    extrapolated: Singles
    time: float
    step: int
    positives: float
    inversions: int


@dataclass
class RunResult:
    """Accepted snapshots of a run in order of time, and numbers of rejected candidates.

    Attributes
    ----------
    samples : list of LabelledSnapshot
        The accepted snapshots.
    degraded : int
        Candidates with too many bad cells.
    quiet : int
        Candidates with too few labelled cells.
    unfinished : int
        Candidates whose label was incomplete when the solver stopped.
    steps : int
        Number of steps of the run.
    end_time : float
        Time at the end of the run.
    ending : str
        Reason for the end of the run.
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
    """A snapshot and the record of its smallest Jacobians, which is extended until tau later.

    ``state`` is None if too many cells are bad. Such a candidate is never accepted.
    """

    state: HydroState | None
    time: float
    step: int
    record: Singles


def run_seed(seed: int, split: int, family: int, index: int) -> np.random.SeedSequence:
    """Return the seed of a run, independent of the seeds of other splits, families and indices.

    Parameters
    ----------
    seed : int
        Seed of the data set.
    split : int
        Index of the split.
    family : int
        Index of the family.
    index : int
        Index of the run.

    Returns
    -------
    numpy.random.SeedSequence
    """
    return np.random.SeedSequence(seed, spawn_key=(split, family, index))


def perform_run(
    family: str,
    size: int,
    seed: np.random.SeedSequence,
    criteria: Criteria = Criteria(),
    watch: Callable[[Hydro], None] | None = None,
) -> RunResult:
    """Run the solver until enough snapshots are accepted, the mesh degrades, or the last time is reached.

    The first snapshots that qualify are accepted, since they precede the tangling; later ones mostly show its result.

    Parameters
    ----------
    family : str
        Family of flow.
    size : int
        Number of cells along each side.
    seed : numpy.random.SeedSequence
        Seed of the initial condition.
    criteria : Criteria
        Definition of labels, and conditions for accepting a snapshot.
    watch : callable, optional
        Called with the solver after every step.

    Returns
    -------
    RunResult
        The accepted snapshots.
    """
    hydro = Hydro(initial_condition(family, size, seed))
    result = RunResult()
    accepted: list[Candidate] = []
    pending: deque[Candidate] = deque()
    result.ending = "last time"
    for index in range(round(LOOKS * criteria.last_time / criteria.tau)):
        pending.append(take_candidate(hydro, criteria))
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
        if len(pending) < LOOKS:  # the window of the oldest candidate is not complete
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
    result.samples = [label_candidate(hydro, candidate, criteria) for candidate in accepted]
    return result


def take_candidate(hydro: Hydro, criteria: Criteria) -> Candidate:
    """Return the solver's current state as a candidate.

    Parameters
    ----------
    hydro : Hydro
    criteria : Criteria

    Returns
    -------
    Candidate
    """
    record = np.full(hydro.gas.mass.shape, 2.0, np.float32)  # above all sines
    lower_to_minimum_jacobian(hydro.state.x, hydro.state.y, record)
    sound = float(np.mean(record < criteria.bad)) < criteria.most_bad
    return Candidate(hydro.state.copy() if sound else None, hydro.time, hydro.steps, record)


def advance(hydro: Hydro, end: float, records: list[Singles], watch: Callable[[Hydro], None] | None) -> None:
    """Advance to time ``end``, and lower ``records`` to the smallest Jacobian of each cell over all steps.

    Parameters
    ----------
    hydro : Hydro
    end : float
        Simulated time.
    records : list of numpy.ndarray
        Smallest Jacobians so far, of each pending candidate.
    watch : callable or None
        Called after each step.
    """
    # One record of this interval serves all candidates, whose windows overlap.
    here = np.full_like(records[0], 2.0)
    while hydro.time < end:
        hydro.step(end)
        lower_to_minimum_jacobian(hydro.state.x, hydro.state.y, here)
        if watch is not None:
            watch(hydro)
    for record in records:
        np.minimum(record, here, out=record)


def label_candidate(hydro: Hydro, candidate: Candidate, criteria: Criteria) -> LabelledSnapshot:
    """Return the labelled snapshot of an accepted candidate.

    Parameters
    ----------
    hydro : Hydro
    candidate : Candidate
    criteria : Criteria

    Returns
    -------
    LabelledSnapshot
    """
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
