"""The exact solutions satisfy the conditions that define them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.exact_solutions import SOD, ShockTube, UniformState, blast_constant

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


def test_a_shock_tube_that_moves_is_the_same_seen_from_elsewhere() -> None:
    moving = ShockTube(*(replace(side, velocity=side.velocity + 0.7) for side in (SOD.left, SOD.right)))
    speed = np.linspace(-2.0, 3.0, 401)
    assert moving.star() == pytest.approx((SOD.star()[0], SOD.star()[1] + 0.7), rel=1e-12)
    np.testing.assert_allclose(moving.density(speed + 0.7), SOD.density(speed), rtol=1e-9)


def test_gases_that_flee_from_a_wall_between_them_thin_out_alike_on_both_sides() -> None:
    tube = ShockTube(UniformState(1.0, -0.5, 1.0), UniformState(1.0, 0.5, 1.0))
    speed = np.linspace(0.01, 3.0, 100)
    np.testing.assert_allclose(tube.density(speed), tube.density(-speed), rtol=1e-9)
    # Behind a fan in which sound has slowed down to c - (gamma - 1) / 2 * 0.5, by the isentrope.
    behind = (1.0 - 0.2 * 0.5 / np.sqrt(1.4)) ** 5
    assert tube.density(np.array([0.01]))[0] == pytest.approx(behind, rel=1e-9)
