"""The cost of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distconv.errors import DataError
from distconv.jobs.mesh import dataset
from distconv.jobs.mesh.production import cost
from distconv.jobs.mesh.production.cost import StepCost, step_cost

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_the_cost_of_a_step_is_reported() -> None:
    found = step_cost(32, 2)
    assert found.seconds_per_step > 0.0 and found.peak_memory_bytes > 1e6
    assert dataset.step_cost(32, 1).steps == 1
    for size, steps in ((32, 0), (15, 1)):
        with pytest.raises(DataError, match=f"--measure-steps {steps} --size {size}: at least 1 step and 16 cells"):
            step_cost(size, steps)


def test_a_cost_is_projected_from_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver is replaced: it takes 3 steps in 6 s, and the reference has 40 steps."""
    seen: list[Any] = []
    clock = iter((1.0, 7.0))
    state = SimpleNamespace(x=1, y=2)
    hydro = SimpleNamespace(step=lambda end: seen.append(("step", end)), state=state)
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(cost, "Hydro", lambda initial: seen.append(initial) or hydro)
    monkeypatch.setattr(cost, "initial_condition", lambda family, size, seed: (family, size, seed.spawn_key))
    monkeypatch.setattr(cost, "perform_run", lambda *given: seen.append(given[:2]) or SimpleNamespace(steps=40))
    monkeypatch.setattr(cost, "take_candidate", lambda hydro, criteria: SimpleNamespace(record="record"))
    monkeypatch.setattr(cost, "lower_to_minimum_jacobian", lambda *given: seen.append(given))
    monkeypatch.setattr(cost, "label_candidate", lambda *given: seen.append("label"))
    monkeypatch.setattr(cost.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=2000))
    monkeypatch.setattr(cost.sys, "platform", "linux")
    found = step_cost(256, 3)
    assert found == StepCost(256, 3, 2.0, 2000 * 1024, 40, 80.0)
    assert seen == [
        ("taylor-green", 128),
        ("taylor-green", 256, (0, 0, 0)),
        *[("step", 2.0), (1, 2, "record")] * 3,
        "label",
        "label",
    ]
    assert str(found).splitlines() == [
        "256 x 256 cells, 3 steps measured: 2.000 s per step, peak memory 2 MB",
        "projected for a run of two samples: 40 steps, 1.3 minutes (steps as at 128 x 128; rare bad cells can make "
        "them up to 2.5 times as many)",
    ]
