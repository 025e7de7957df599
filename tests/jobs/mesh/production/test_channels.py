"""The channels of a sample: the extrapolated Jacobian, and mirror images."""

from __future__ import annotations

from functools import partial

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
    """The state seen in a mirror across the middle of the domain, or across its diagonal."""
    if axis == "diagonal":
        x, y, u, v, energy = (array.T.copy() for array in state)
        return HydroState(y, x, v, u, energy)
    x, y, u, v, energy = (np.flip(array, 1 if axis == "w" else 0).copy() for array in state)
    return HydroState(side - x, y, -u, v, energy) if axis == "w" else HydroState(x, side - y, u, -v, energy)


@pytest.mark.parametrize("axis", ["h", "w", "diagonal"])
def test_a_mirrored_sample_is_the_sample_of_the_mirrored_flow(axis: str) -> None:
    hydro = Hydro(initial_condition("triple-point", SIZE, run_seed(5, 0, 3, 0)))
    hydro.run(0.08)
    turn = np.transpose if axis == "diagonal" else partial(np.flip, axis=1 if axis == "w" else 0)
    gas = hydro.gas
    fields = {name: turn(getattr(gas, name)).copy() for name in ("mass", "gamma", "volume0")}
    mirrored = mirror(hydro.state, SIZE / CELLS_PER_UNIT, axis)
    expected = sample_channels(mirrored, gas._replace(**fields), hydro.coefficients)
    channels = sample_channels(hydro.state, gas, hydro.coefficients)
    label = (channels[12] < 0.9).astype(np.uint8)
    found, found_label = transpose(channels, label) if axis == "diagonal" else flip(channels, label, axis)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found_label, turn(label))
    # Each change matters: the velocities differ, and the channels that change their sign are not near zero.
    assert np.abs(channels[CHANNELS.index("velocity u")] - channels[CHANNELS.index("velocity v")]).max() > 0.1
    for name in ("velocity u", "velocity v", "vorticity", "skew", "log aspect ratio"):
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
