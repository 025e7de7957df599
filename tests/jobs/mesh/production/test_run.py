"""One run: its labels are those of the time from a snapshot to tau, and quiet snapshots are rejected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.state import HydroState
from distconv.jobs.mesh.production import run as run_module
from distconv.jobs.mesh.production.run import LOOKS, Criteria, perform_run, run_seed

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_a_snapshot_with_too_few_labels_is_rejected() -> None:
    result = perform_run("vortices", 32, run_seed(0, 0, 1, 0), Criteria(tau=0.1, least_labelled=1.1, last_time=0.2))
    assert result.samples == []
    assert result.quiet > 0


class Dented:
    """In place of a gas: square cells, of which the first has its outer corner at (p, p) at some times.

    The sine of that corner is (1 - 2 p) / (1 - 2 p + 2 p^2).
    """

    DENTS: ClassVar = {0.1: 0.45, 0.35: 0.5}
    coefficients = None

    def __init__(self, initial: object) -> None:
        x, y = np.meshgrid(np.arange(3.0), np.arange(3.0))
        self.gas = SimpleNamespace(mass=np.ones((2, 2)))
        self.state = HydroState(x, y, 0.0 * x, 0.0 * x, np.ones((2, 2)))
        self.time, self.steps = 0.0, 0

    def step(self, end: float) -> None:
        self.steps += 1
        self.time = min(end, 0.05 * self.steps)
        dent = next((p for time, p in self.DENTS.items() if abs(time - self.time) < 1e-9), 0.0)
        self.state.x[0, 0] = self.state.y[0, 0] = dent


def test_a_label_is_what_happens_from_its_snapshot_to_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at 0, 0.1, ... of which that at 0.1 is too bad; the flat corner at 0.35 is in the windows of the others."""
    monkeypatch.setattr(run_module, "Hydro", Dented)
    monkeypatch.setattr(run_module, "initial_condition", lambda *_: None)
    monkeypatch.setattr(run_module, "sample_channels", lambda *_: np.zeros((18, 2, 2)))
    monkeypatch.setattr(run_module, "extrapolated_jacobian", lambda *_: np.zeros((2, 2)))
    found = perform_run("", 2, run_seed(0, 0, 0, 0), Criteria(tau=0.4, most_bad=0.2, least_labelled=0.2))
    assert [sample.time for sample in found.samples] == pytest.approx([0.0, 0.2])
    for sample in found.samples:
        np.testing.assert_array_equal(sample.label, [[1, 0], [0, 0]])
        assert (sample.positives, sample.inversions) == (0.25, 1)
    assert (found.degraded, found.quiet, found.unfinished, found.ending) == (1, 0, 0, "enough snapshots")
    assert found.end_time == pytest.approx(0.6)


def test_criteria_and_seeds_are_those_of_the_data_sets() -> None:
    assert Criteria() == Criteria(0.3, 0.4, 0.25, 0.03, 0.01, 2, 2.0) and LOOKS == 4
    seed = run_seed(7, 1, 2, 3)
    assert (seed.entropy, seed.spawn_key) == (7, (1, 2, 3))
