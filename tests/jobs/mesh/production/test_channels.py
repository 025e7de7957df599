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
from distconv.jobs.mesh.hydro.state import Coefficients, HydroState
from distconv.jobs.mesh.production.channels import extrapolated_jacobian, sample_channels
from distconv.jobs.mesh.production.run import run_seed
from tests.jobs.mesh.hydro.gases import at_rest, box, warped
from tests.jobs.mesh.mesh_files import SIZE

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_extrapolation_is_exact_where_velocities_do_not_change() -> None:
    hydro = warped()
    hydro.state.u[:] = 0.5 * hydro.state.y
    record = np.full(hydro.state.energy.shape, 2.0, np.float32)
    for time in np.linspace(0.0, 0.3, 21):
        lower_to_minimum_jacobian(hydro.state.x + time * hydro.state.u, hydro.state.y, record)
    np.testing.assert_array_equal(extrapolated_jacobian(hydro.state, 0.3), record)


def mirror(state: HydroState, side: float, axis: str) -> HydroState:
    """The state seen in a mirror across the middle of the domain."""
    along = 1 if axis == "w" else 0
    x, y, u, v, energy = (np.flip(array, along).copy() for array in state)
    return HydroState(side - x, y, -u, v, energy) if axis == "w" else HydroState(x, side - y, u, -v, energy)


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
    expected = sample_channels(HydroState(y, x, v, u, energy), turned_gas, hydro.coefficients)
    channels = sample_channels(hydro.state, gas, hydro.coefficients)
    label = (channels[12] < 0.9).astype(np.uint8)
    turned, turned_label = transpose(channels, label)
    np.testing.assert_allclose(turned, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(turned_label, label.T)
    # Each change matters: the velocities differ, and the channels that change sign are not near zero.
    assert np.abs(channels[CHANNELS.index("velocity u")] - channels[CHANNELS.index("velocity v")]).max() > 0.1
    for name in ("vorticity", "log aspect ratio"):
        assert np.abs(channels[CHANNELS.index(name)]).max() > 0.01


def test_gradients_of_a_linear_velocity_are_its_coefficients() -> None:
    hydro = warped()
    x, y = hydro.state.x.copy(), hydro.state.y.copy()
    for (u_x, u_y, v_x, v_y), expected in {
        (0.0, -1.0, 1.0, 0.0): (0.0, 2.0, 0.0),  # counter-clockwise rotation
        (0.5, 0.0, 0.0, 0.25): (0.75, 0.0, 0.25),
        (0.5, 3.0, 1.0, -2.5): (-2.0, -2.0, 5.0),
    }.items():
        hydro.state.u[:], hydro.state.v[:] = u_x * x + u_y * y, v_x * x + v_y * y
        channels = sample_channels(hydro.state, hydro.gas, hydro.coefficients)
        for channel, value in zip(channels[7:10], expected, strict=True):
            np.testing.assert_allclose(channel, value, atol=1e-6)


def test_a_gas_has_the_density_pressure_energy_and_velocity_it_was_given() -> None:
    x, y = box(3, 2, 0.5)
    one = np.ones((2, 3))
    hydro = Hydro(at_rest(x, y, 2.0 * one, 3.0 * one, gamma=1.5))
    hydro.state.u[0, 0], hydro.state.v[2, 3] = 4.0, 8.0
    channels = sample_channels(hydro.state, hydro.gas, hydro.coefficients)
    for channel, value in zip(channels[:5], (np.log(2.0), np.log(3.0), 3.0, 1.5, 1.5), strict=True):
        np.testing.assert_allclose(channel, value, rtol=1e-6)
    np.testing.assert_array_equal(channels[5], [[1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(channels[6], [[0, 0, 0], [0, 0, 2]])


@pytest.mark.parametrize(
    ("corners", "expected"),
    [  # log V/V0, smallest and largest sine, log aspect ratio, log edge ratio, skew, taper
        (  # parallelogram
            [(0, 0), (2, 0), (3, 1), (1, 1)],
            (np.log(2), 0.5**0.5, 0.5**0.5, np.log(2) / 2, np.log(2) / 2, 0.5**0.5, 0),
        ),
        (  # trapezium
            [(0, 0), (4, 0), (3, 2), (1, 2)],
            (np.log(6), 0.8**0.5, 0.8**0.5, np.log(1.5), np.log(2), 0, 1),
        ),
        (  # two right angles, one of 45 and one of 135 degrees
            [(0, 0), (2, 0), (1, 1), (0, 1)],
            (np.log(1.5), 0.5**0.5, 1, np.log(1.5 / 1.25**0.5), np.log(2), -(0.2**0.5), 1 / 1.25**0.5),
        ),
    ],
)
def test_the_shape_of_a_cell(corners: list[tuple[float, float]], expected: tuple[float, ...]) -> None:
    hydro = Hydro(at_rest(*box(1, 1, 1.0), np.ones((1, 1)), np.ones((1, 1))))
    for (j, i), (x, y) in zip(((0, 0), (0, 1), (1, 1), (1, 0)), corners, strict=True):
        hydro.state.x[j, i], hydro.state.y[j, i] = x, y
    channels = sample_channels(hydro.state, hydro.gas, hydro.coefficients)[:, 0, 0]
    np.testing.assert_allclose(channels[11:], expected, atol=1e-6)


def test_viscous_heating_is_the_pressure_jump_of_the_shock_times_the_closing_velocity_over_the_width() -> None:
    # Rankine and Hugoniot, at Mach 3; coefficients of one make the jump exact.
    density, pressure, gamma, mach = 2.0, 3.0, 1.4, 3.0
    closing = 2.0 * np.sqrt(gamma * pressure / density) / (gamma + 1.0) * (mach - 1.0 / mach)
    jump = pressure * 2.0 * gamma / (gamma + 1.0) * (mach**2 - 1.0)
    x, y = box(6, 3, 0.5)
    one = np.ones((3, 6))
    hydro = Hydro(at_rest(x, y, density * one, pressure * one, gamma))
    hydro.state.u[:] = np.where(x < 1.25, closing, 0.0)
    channels = sample_channels(hydro.state, hydro.gas, Coefficients(1.0, 1.0, 0.1, 0.05))
    expected = np.zeros((3, 6))
    expected[:, 2] = np.log(1.0 + jump * closing / 0.5)
    np.testing.assert_allclose(channels[10], expected, rtol=1e-6, atol=1e-6)
