"""The cost of a step."""

from __future__ import annotations

import pytest

from distconv.errors import DataError
from distconv.jobs.mesh import dataset
from distconv.jobs.mesh.production.cost import step_cost

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_the_cost_of_a_step_is_reported() -> None:
    cost = step_cost(32, 2)
    assert cost.seconds_per_step > 0.0 and cost.peak_memory_bytes > 1e6
    assert cost.projected_seconds == pytest.approx(cost.seconds_per_step * cost.projected_steps)
    assert "32 x 32 cells, 2 steps measured" in str(cost)
    assert dataset.step_cost(32, 1).steps == 1
    with pytest.raises(DataError, match="--measure-steps 0 --size 32"):
        step_cost(32, 0)
