"""Initial conditions: fixed by their seed, of cells of one size, transonic."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.cell_geometry import (
    extreme_jacobians,
)
from distconv.jobs.mesh.hydro.initial_conditions import CELLS_PER_UNIT, FAMILIES, initial_condition
from distconv.jobs.mesh.hydro.solver import Hydro
from distconv.jobs.mesh.production.run import run_seed

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_fixes_the_initial_condition(family: str) -> None:
    first, again, other = (initial_condition(family, 32, run_seed(0, 0, 0, index)) for index in (0, 0, 1))
    np.testing.assert_array_equal(first.u, again.u)
    np.testing.assert_array_equal(first.density, again.density)
    assert np.abs(first.u - other.u).max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_cells_keep_their_size_whatever_the_number(family: str) -> None:
    for size in (32, 96):
        start = initial_condition(family, size, run_seed(0, 0, 0, 0))
        assert start.x[0, -1] == pytest.approx(size / CELLS_PER_UNIT)
        hydro = Hydro(start)
        assert np.sqrt(hydro.volumes().mean()) == pytest.approx(1.0 / CELLS_PER_UNIT)
        # A smooth perturbation: cells are neither slivers nor squares.
        smallest = extreme_jacobians(start.x, start.y)[0].min()
        assert 0.7 < smallest < 0.9999


@pytest.mark.parametrize("family", ["taylor-green", "vortices", "shear"])
def test_flows_are_transonic(family: str) -> None:
    for index in range(6):
        start = initial_condition(family, 128, run_seed(0, 0, 0, index))
        sound = np.sqrt(start.gamma * start.pressure / start.density).mean()
        # The nominal range is 0.5 to 1.2 at unit density.
        assert 0.4 < np.quantile(np.hypot(start.u, start.v), 0.99) / sound < 1.5
