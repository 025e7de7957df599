"""Cost of a run, measured over a few steps."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

from distconv.errors import DataError
from distconv.jobs.mesh.hydro.cell_geometry import lower_to_minimum_jacobian
from distconv.jobs.mesh.hydro.initial_conditions import FAMILIES, initial_condition
from distconv.jobs.mesh.hydro.solver import Hydro

from .run import LOOKS, Criteria, label_candidate, perform_run, run_seed, take_candidate

__all__ = ["StepCost", "step_cost"]

# A short run of this size gives an estimate of the number of steps of a larger run: cells have the same size in both.
# The time step is limited by the worst cell, so more cells may need more steps: up to
# 1024 x 1024 the ratio was 0.9 to 2.4.
REFERENCE_SIZE = 128


@dataclass(frozen=True)
class StepCost:
    """Cost of a run of ``size`` x ``size`` cells on one core, with a projection to a full run of two samples."""

    size: int
    steps: int
    seconds_per_step: float
    peak_memory_bytes: int
    projected_steps: int
    projected_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.size} x {self.size} cells, {self.steps} steps measured: {self.seconds_per_step:.3f} s per step, "
            f"peak memory {self.peak_memory_bytes / 1e6:,.0f} MB\n"
            f"projected for a run of two samples: {self.projected_steps} steps, "
            f"{self.projected_seconds / 60:.1f} minutes "
            f"(steps as at {REFERENCE_SIZE} x {REFERENCE_SIZE}; rare bad cells can make them up to 2.5 times as many)"
        )


def step_cost(size: int, steps: int, *, family: str = "taylor-green", seed: int = 0) -> StepCost:
    """Measure the cost of a run: steps with the recording of Jacobians, and the computation of two samples.

    The peak memory is that of a full run, because as many snapshots are held. A run of a small mesh gives the number of
    steps for the projection.

    Parameters
    ----------
    size : int
        Number of cells along each side, at least 16.
    steps : int
        Number of steps to measure.
    family : str
        Family of flow.
    seed : int
        Seed of the run.

    Returns
    -------
    StepCost
        Times in seconds, memory in bytes.

    Raises
    ------
    DataError
        If ``size`` is below 16 or ``steps`` is not positive.
    """
    if size < 16 or steps < 1:
        raise DataError(f"--measure-steps {steps} --size {size}: at least 1 step and 16 cells are required")
    origin = run_seed(seed, 0, list(FAMILIES).index(family), 0)
    reference = perform_run(family, min(size, REFERENCE_SIZE), origin)
    criteria = Criteria()
    hydro = Hydro(initial_condition(family, size, origin))
    held = [take_candidate(hydro, criteria) for _ in range(LOOKS + 1)]
    record = held[-1].record
    start = time.perf_counter()
    for _ in range(steps):
        hydro.step(criteria.last_time)
        lower_to_minimum_jacobian(hydro.state.x, hydro.state.y, record)
    seconds = (time.perf_counter() - start) / steps
    samples = [label_candidate(hydro, candidate, criteria) for candidate in held[:2]]
    # Linux counts in kilobytes, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    del held, samples  # kept until the peak memory was read
    return StepCost(size, steps, seconds, peak, reference.steps, seconds * reference.steps)
