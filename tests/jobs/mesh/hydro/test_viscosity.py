"""Artificial viscosity: it only heats, and leaves uniform compression alone."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.advance import internal_work
from distconv.jobs.mesh.hydro.solver import Hydro
from distconv.jobs.mesh.hydro.state import Coefficients
from tests.jobs.mesh.hydro.gases import at_rest, box, warped
from tests.jobs.mesh.hydro.test_forces import forces_of_motion

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_artificial_viscosity_and_hourglass_damping_only_ever_heat() -> None:
    hydro = warped()
    rng = np.random.default_rng(2)
    hydro.state.u[:] = rng.normal(size=hydro.state.u.shape)
    hydro.state.v[:] = rng.normal(size=hydro.state.v.shape)
    hydro.state.energy[:] = rng.uniform(0.5, 1.0, hydro.state.energy.shape)
    heat = []
    for coefficients in (Coefficients(0.5, 1.0, 0.1, 0.0), Coefficients(0.0, 0.0, 0.0, 0.0)):
        hydro.coefficients = coefficients
        hydro._forces(hydro.state)
        gained = np.empty_like(hydro.state.energy)
        state = hydro.state
        internal_work(np.zeros_like(gained), state.u, state.v, hydro._fx, hydro._fy, hydro.gas.mass, 1.0, gained)
        heat.append(gained)
    assert (heat[0] - heat[1] > 0.0).all()


def test_uniform_compression_meets_no_viscosity() -> None:
    x, y = box(6, 6, 1.0)
    one = np.ones((6, 6))
    smooth = forces_of_motion(Hydro(at_rest(x, y, one, one)), -0.3 * (x - 3.0), -0.3 * (y - 3.0))
    assert np.abs(smooth).max() < 1e-14
    sudden = forces_of_motion(Hydro(at_rest(x, y, one, one)), np.where(x < 2.5, 1.0, 0.0), 0.0 * y)
    assert np.abs(sudden).max() > 0.1
