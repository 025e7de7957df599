"""The exact solutions satisfy the conditions that define them."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.exact_solutions import SOD, blast_constant

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_exact_shock_tube_satisfies_the_jump_conditions() -> None:
    pressure, velocity = SOD.star()
    just_right, just_left = SOD.density(np.array([velocity + 1e-9, velocity - 1e-9]))
    # Mass and momentum through the shock; entropy through the rarefaction.
    shock = velocity * just_right / (just_right - 0.125)
    assert 0.125 * shock * velocity == pytest.approx(pressure - 0.1, rel=1e-9)
    assert SOD.density(np.array([shock + 1e-9, shock - 1e-9])) == pytest.approx([0.125, just_right], rel=1e-6)
    assert pressure / just_left**1.4 == pytest.approx(1.0, rel=1e-12)


def test_blast_constant_does_not_depend_on_the_integration_step() -> None:
    assert blast_constant(1.4, 1000) == pytest.approx(blast_constant(1.4, 4000), rel=1e-6)
