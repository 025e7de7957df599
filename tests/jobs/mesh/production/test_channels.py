"""The channels of a sample: the extrapolated Jacobian, and mirror images."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.dataset import CHANNELS, flip, transpose
from distconv.jobs.mesh.hydro.cell_geometry import (
    lower_to_minimum_jacobian,
)
from distconv.jobs.mesh.hydro.initial_conditions import CELLS_PER_UNIT, initial_condition
from distconv.jobs.mesh.hydro.solver import Hydro
from distconv.jobs.mesh.hydro.state import State
from distconv.jobs.mesh.production.channels import extrapolated_jacobian, sample_channels
from distconv.jobs.mesh.production.run import run_seed
from tests.jobs.mesh.hydro.gases import warped
from tests.jobs.mesh.mesh_files import SIZE

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_extrapolation_is_exact_where_velocities_do_not_change() -> None:
    hydro = warped()
    hydro.state.u[:] = 0.5 * hydro.state.y
    record = np.full(hydro.state.energy.shape, 2.0, np.float32)
    for time in np.linspace(0.0, 0.3, 21):
        lower_to_minimum_jacobian(hydro.state.x + time * hydro.state.u, hydro.state.y, record)
    np.testing.assert_array_equal(extrapolated_jacobian(hydro.state, 0.3), record)


def mirror(state: State, side: float, axis: str) -> State:
    """The state seen in a mirror across the middle of the domain."""
    along = 1 if axis == "w" else 0
    x, y, u, v, energy = (np.flip(array, along).copy() for array in state)
    return State(side - x, y, -u, v, energy) if axis == "w" else State(x, side - y, u, -v, energy)


@pytest.mark.parametrize("axis", ["h", "w"])
def test_a_flipped_sample_is_the_sample_of_the_mirrored_flow(axis: str) -> None:
    hydro = Hydro(initial_condition("triple-point", SIZE, run_seed(5, 0, 3, 0)))
    hydro.run(0.08)
    gas, along = hydro.gas, 1 if axis == "w" else 0
    mirrored_gas = gas._replace(
        mass=np.flip(gas.mass, along).copy(),
        gamma=np.flip(gas.gamma, along).copy(),
        volume0=np.flip(gas.volume0, along).copy(),
    )
    channels = sample_channels(hydro.state, gas, hydro.coefficients)
    mirrored_state = mirror(hydro.state, SIZE / CELLS_PER_UNIT, axis)
    expected = sample_channels(mirrored_state, mirrored_gas, hydro.coefficients)
    label = (channels[12] < 0.9).astype(np.uint8)
    flipped, flipped_label = flip(channels, label, axis)
    np.testing.assert_allclose(flipped, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(flipped_label, np.flip(label, along))
    # Each sign matters: these channels are not near zero.
    for name in ("velocity u", "velocity v", "vorticity", "skew"):
        assert np.abs(channels[CHANNELS.index(name)]).max() > 0.01


def test_a_transposed_sample_is_the_sample_of_the_flow_mirrored_in_the_diagonal() -> None:
    hydro = Hydro(initial_condition("triple-point", SIZE, run_seed(5, 0, 3, 0)))
    hydro.run(0.08)
    gas = hydro.gas
    turned_gas = gas._replace(mass=gas.mass.T.copy(), gamma=gas.gamma.T.copy(), volume0=gas.volume0.T.copy())
    x, y, u, v, energy = (array.T.copy() for array in hydro.state)
    expected = sample_channels(State(y, x, v, u, energy), turned_gas, hydro.coefficients)
    channels = sample_channels(hydro.state, gas, hydro.coefficients)
    label = (channels[12] < 0.9).astype(np.uint8)
    turned, turned_label = transpose(channels, label)
    np.testing.assert_allclose(turned, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(turned_label, label.T)
    # Each change matters: the velocities differ, and the channels that change sign are not near zero.
    assert np.abs(channels[CHANNELS.index("velocity u")] - channels[CHANNELS.index("velocity v")]).max() > 0.1
    for name in ("vorticity", "log aspect ratio"):
        assert np.abs(channels[CHANNELS.index(name)]).max() > 0.01
