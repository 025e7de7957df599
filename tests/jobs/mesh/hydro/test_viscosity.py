"""Artificial viscosity: the pressure jump of a shock, and none in uniform compression."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.solver import Hydro
from distconv.jobs.mesh.hydro.viscosity import edge_force, edge_openness, openness
from tests.jobs.mesh.hydro.gases import at_rest, box
from tests.jobs.mesh.hydro.test_forces import forces_of_motion

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_uniform_compression_meets_no_viscosity() -> None:
    x, y = box(6, 6, 1.0)
    one = np.ones((6, 6))
    smooth = forces_of_motion(Hydro(at_rest(x, y, one, one)), -0.3 * (x - 3.0), -0.3 * (y - 3.0))
    assert np.abs(smooth).max() < 1e-14
    sudden = forces_of_motion(Hydro(at_rest(x, y, one, one)), np.where(x < 2.5, 1.0, 0.0), 0.0 * y)
    assert np.abs(sudden).max() > 0.1


@pytest.mark.parametrize("gamma", [1.4, 5.0 / 3.0])
@pytest.mark.parametrize("mach", [1.05, 1.5, 4.0, 50.0])
def test_with_both_coefficients_one_the_force_is_the_pressure_jump_of_a_shock(mach: float, gamma: float) -> None:
    """Rankine and Hugoniot: p1 / p0 and the jump of velocity of a shock of that Mach number (Kuropatenko 1967)."""
    density, pressure = 1.3, 0.7
    sound = np.sqrt(gamma * pressure / density)
    jump = pressure * 2.0 * gamma / (gamma + 1.0) * (mach**2 - 1.0)
    closing = 2.0 * sound / (gamma + 1.0) * (mach - 1.0 / mach)
    along, across = edge_force(-closing, 0.0, 1.0, 0.0, density, sound, 0.25 * (gamma + 1.0))
    assert along == pytest.approx(jump, rel=1e-12)  # pushes the far end away, which comes nearer
    assert across == 0.0
    assert edge_force(closing, 0.0, 1.0, 0.0, density, sound, 0.25 * (gamma + 1.0)) == (0.0, 0.0)


def test_a_sudden_stop_meets_the_pressure_of_default_coefficients() -> None:
    # Unit cells of unit density and pressure at rest, but for nodes that come in from the left with speed 1.
    gamma, speed = 1.4, 1.0
    x, y = box(6, 6, 1.0)
    one = np.ones((6, 6))
    sudden = forces_of_motion(Hydro(at_rest(x, y, one, one)), np.where(x < 2.5, speed, 0.0), 0.0 * y)
    c, quadratic = 0.5 * np.sqrt(gamma), 0.25 * (gamma + 1.0) * speed
    pressure = (quadratic + np.sqrt(quadratic**2 + c**2)) * speed
    # Each of a cell's two edges along x has half of its height to push through; hourglass forces see none of it.
    assert sudden[1, 2, 2] == pytest.approx(0.5 * pressure, rel=1e-12)
    assert sudden[0, 2, 2] == pytest.approx(-0.5 * pressure, rel=1e-12)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(1.0, 1.0, 0.0), (0.3, 1.0, 0.4), (1.0, 0.3, 0.4), (0.8, 0.4, 0.4), (0.6, 0.6, 0.4), (-0.5, 1.0, 1.0),
     (3.0, 3.0, 0.0)],
)  # fmt: skip
def test_the_limiter_is_the_smallest_of_the_mean_slope_twice_either_and_one(
    before: float, after: float, expected: float
) -> None:
    """Caramana, Shashkov, Whalen 1998: psi = max(0, min((l + r) / 2, 2 l, 2 r, 1)), of slopes over that of the edge."""
    edge = (2.0, 0.0, 1.0, 0.0)
    found = openness((2.0, 0.0, before, 0.0), edge, (1.0, 0.0, after / 2, 0.0))
    assert found == pytest.approx(expected, abs=1e-14)


def test_behind_the_walls_the_flow_goes_on_mirrored() -> None:
    x, y = box(4, 3, 1.0)
    hydro = Hydro(at_rest(x, y, np.ones((3, 4)), np.ones((3, 4))))
    hydro.state.u[:], hydro.state.v[:] = -0.3 * x, -0.2 * y
    edge_openness(hydro.state, hydro.openness)
    # Linear along both directions up to the walls and beyond: no edge is open.
    assert np.abs(hydro.openness.along_x).max() < 1e-14
    assert np.abs(hydro.openness.along_y).max() < 1e-14
