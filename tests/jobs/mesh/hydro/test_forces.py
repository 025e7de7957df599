"""Corner forces: they balance in each cell, and damping leaves linear flow alone."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.cell_geometry import (
    corner_volumes,
)
from distconv.jobs.mesh.hydro.jit import Floats
from distconv.jobs.mesh.hydro.solver import Hydro
from distconv.jobs.mesh.hydro.state import Coefficients
from tests.jobs.mesh.hydro.gases import at_rest, box, warped

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_forces_of_a_cell_sum_to_zero() -> None:
    hydro = warped()
    rng = np.random.default_rng(1)
    hydro.state.u[:] = rng.normal(size=hydro.state.u.shape)
    hydro.state.v[:] = rng.normal(size=hydro.state.v.shape)
    hydro._forces(hydro.state)
    scale = np.abs(hydro._fx).max()
    assert np.abs(hydro._fx.sum(0)).max() < 1e-13 * scale
    assert np.abs(hydro._fy.sum(0)).max() < 1e-13 * scale


def test_subzonal_forces_are_derivatives_of_the_corner_volumes() -> None:
    # One gas in an uneven cell: each subzone keeps its share of the mass. Two nodes are moved, and the work against the
    # forces is compared with the subzones' change of volume.
    x, y = box(1, 1, 1.0)
    x[0, 1], y[0, 1] = 1.4, -0.2
    fraction = corner_volumes(x, y)[:, 0, 0] / corner_volumes(x, y).sum()
    assert fraction.max() - fraction.min() > 0.05
    one = np.ones((1, 1))
    hydro = Hydro(at_rest(x, y, one, one), coefficients=Coefficients(0.0, 0.0, 0.0, 1.0))
    plain = Hydro(at_rest(x, y, one, one), coefficients=Coefficients(0.0, 0.0, 0.0, 0.0))
    for gas in (hydro, plain):
        gas.state.x[1, 1] += 0.2
        gas.state.y[1, 1] += 0.1
        gas._forces(gas.state)
    state = hydro.state
    shares = corner_volumes(state.x, state.y)[:, 0, 0] / float(hydro.volumes()[0, 0])
    stiffness = 1.4 * 0.4 * state.energy[0, 0] * hydro.gas.mass[0, 0] / hydro.volumes()[0, 0]
    pressures = stiffness * (1.0 - shares / fraction)
    for corner, (j, i) in enumerate(((0, 0), (0, 1), (1, 1), (1, 0))):
        for nodes, force in ((state.x, hydro._fx - plain._fx), (state.y, hydro._fy - plain._fy)):
            kept, volumes = nodes[j, i], []
            for shift in (1e-6, -1e-6):
                nodes[j, i] = kept + shift
                volumes.append(corner_volumes(state.x, state.y)[:, 0, 0])
            nodes[j, i] = kept
            expected = pressures @ (volumes[0] - volumes[1]) / 2e-6
            assert force[corner, 0, 0] == pytest.approx(expected, abs=1e-8)


def forces_of_motion(hydro: Hydro, u: Floats, v: Floats) -> Floats:
    """Return the increase of the corner forces along x when the nodes get the velocities ``u, v``."""
    hydro._forces(hydro.state)
    at_rest = hydro._fx.copy()
    hydro.state.u[:], hydro.state.v[:] = u, v
    hydro._forces(hydro.state)
    return hydro._fx - at_rest


def test_linear_velocity_meets_no_hourglass_damping_in_cells_of_any_shape() -> None:
    hydro = warped()
    hydro.coefficients = Coefficients(0.0, 0.0, 0.1, 0.0)
    x, y = hydro.state.x, hydro.state.y
    assert np.abs(forces_of_motion(hydro, 0.3 * x - 0.2 * y, 0.1 * x + 0.5 * y)).max() < 1e-14
    assert np.abs(forces_of_motion(hydro, x * y, x * y)).max() > 1e-3


def test_a_gas_at_rest_pushes_its_corners_with_its_pressure_over_half_a_side() -> None:
    x, y = box(3, 2, 0.5)
    one = np.ones((2, 3))
    hydro = Hydro(at_rest(x, y, 2.0 * one, 3.0 * one, gamma=1.5))
    hydro._forces(hydro.state)
    push = 0.5 * 0.5 * 3.0
    for corner, (along, up) in enumerate(((-1, -1), (1, -1), (1, 1), (-1, 1))):
        np.testing.assert_allclose(hydro._fx[corner], along * push, rtol=1e-12)
        np.testing.assert_allclose(hydro._fy[corner], up * push, rtol=1e-12)


def test_an_hourglass_is_damped_by_rho_c_over_the_root_of_its_area() -> None:
    # One cell of 2 x 2, density 2, pressure 3, gamma 1.5: on it g is (1, -1, 1, -1), so that g (g . u) / (g . g) is u.
    x, y = box(1, 1, 2.0)
    hydro = Hydro(at_rest(x, y, np.full((1, 1), 2.0), np.full((1, 1), 3.0), gamma=1.5))
    hydro.coefficients = Coefficients(0.0, 0.0, 0.1, 0.0)
    u = np.array([[1.0, -1.0], [-1.0, 1.0]])
    strength = 0.1 * 2.0 * np.sqrt(1.5 * 3.0 / 2.0) * np.sqrt(4.0)
    found = forces_of_motion(hydro, u, 0.0 * u)
    np.testing.assert_allclose(found[:, 0, 0], -strength * np.array([1.0, -1.0, 1.0, -1.0]), rtol=1e-12)
