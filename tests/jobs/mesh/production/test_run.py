"""One run: its labels are what every step says, and quiet snapshots are rejected."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.cell_geometry import (
    extreme_jacobians,
)
from distconv.jobs.mesh.hydro.initial_conditions import initial_condition
from distconv.jobs.mesh.hydro.solver import Hydro
from distconv.jobs.mesh.production.run import LOOKS, Criteria, perform_run, run_seed

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_labels_are_what_every_step_of_the_run_says() -> None:
    seed, criteria = run_seed(0, 0, 1, 0), Criteria(tau=0.1)
    result = perform_run("vortices", 64, seed, criteria)
    assert len(result.samples) == 2
    assert result.samples[1].time - result.samples[0].time >= criteria.tau / LOOKS - 1e-12
    hydro = Hydro(initial_condition("vortices", 64, seed))
    history = [(0.0, 0, extreme_jacobians(hydro.state.x, hydro.state.y)[0])]
    for stop in range(1, 40):
        while hydro.time < criteria.tau * stop / LOOKS:
            hydro.step(criteria.tau * stop / LOOKS)
            history.append((hydro.time, hydro.steps, extreme_jacobians(hydro.state.x, hydro.state.y)[0]))
        if hydro.time > result.end_time - 1e-12:
            break
    for sample in result.samples:
        until = sample.time + criteria.tau + 1e-12
        window = np.min([j for time, _, j in history if sample.time - 1e-12 <= time <= until], axis=0)
        np.testing.assert_array_equal(sample.label, (window.astype(np.float32) < np.float32(0.4)).astype(np.uint8))
        now = next(j for _, step, j in history if step == sample.step)
        np.testing.assert_array_equal(sample.channels[12], now.astype(np.float32))
        assert np.mean(now < criteria.bad) < criteria.most_bad
        assert sample.label.mean() >= criteria.least_labelled
        assert sample.inversions == np.count_nonzero(window <= 0.0)


def test_a_snapshot_with_too_few_labels_is_rejected() -> None:
    result = perform_run("vortices", 32, run_seed(0, 0, 1, 0), Criteria(tau=0.1, least_labelled=1.1, last_time=0.2))
    assert result.samples == []
    assert result.quiet > 0
