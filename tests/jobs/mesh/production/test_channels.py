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


def test_every_channel_of_a_cell_that_is_worked_out_by_hand() -> None:
    """Parallelograms of sides (2, 0) and (1, 1) that rotate, stretch and shear; not a number here is the code's."""
    i, j = np.meshgrid(np.arange(4.0), np.arange(4.0))
    hydro = warped(size=3)
    state, gas = hydro.state, hydro.gas
    state.x[:], state.y[:] = 2.0 * i + j, j
    # u = 0.2 - 3 x + 5 y, v = 0.1 + 7 x + 2 y
    state.u[:], state.v[:] = 0.2 - 3.0 * state.x + 5.0 * state.y, 0.1 + 7.0 * state.x + 2.0 * state.y
    state.energy[:], gas.mass[:], gas.gamma[:], gas.volume0[:] = 1.5, 6.0, 1.4, 0.5
    channels = sample_channels(state, gas, hydro.coefficients)
    found = dict(zip(CHANNELS, channels[:, 1, 2], strict=True))
    x, y = 2.0 * 2.5 + 1.5, 1.5  # its middle: i = 2.5, j = 1.5
    density, length = 3.0, np.sqrt(2.0)
    assert found == {
        "log density": pytest.approx(np.log(density)),
        "log pressure": pytest.approx(np.log(0.4 * density * 1.5)),
        "specific energy": pytest.approx(1.5),
        "sound speed": pytest.approx(np.sqrt(1.4 * 0.4 * 1.5)),
        "gamma": pytest.approx(1.4),
        "velocity u": pytest.approx(0.2 - 3.0 * x + 5.0 * y),
        "velocity v": pytest.approx(0.1 + 7.0 * x + 2.0 * y),
        "divergence": pytest.approx(-3.0 + 2.0),
        "vorticity": pytest.approx(7.0 - 5.0),
        "strain rate": pytest.approx(np.hypot(-3.0 - 2.0, 7.0 + 5.0)),
        "viscous heating": found["viscous heating"],
        "log V/V0": pytest.approx(np.log(2.0 / 0.5)),
        "minimum Jacobian": pytest.approx(1.0 / length),
        "maximum Jacobian": pytest.approx(1.0 / length),
        "log aspect ratio": pytest.approx(np.log(2.0 / length)),
        "log edge ratio": pytest.approx(np.log(2.0 / length)),
        "skew": pytest.approx(1.0 / length),  # 45 degrees
        "taper": pytest.approx(0.0, abs=1e-6),
    }


def test_a_rigid_rotation_has_twice_its_angular_speed_as_vorticity_and_nothing_else() -> None:
    hydro = warped()
    state = hydro.state
    state.u[:], state.v[:] = -0.3 * state.y, 0.3 * state.x  # counter-clockwise
    channels = dict(zip(CHANNELS, sample_channels(state, hydro.gas, hydro.coefficients), strict=True))
    np.testing.assert_allclose(channels["vorticity"], 0.6, rtol=1e-6)
    for name in ("divergence", "strain rate"):
        np.testing.assert_allclose(channels[name], 0.0, atol=1e-6)


def test_a_trapezium_tapers_by_its_sides() -> None:
    # Below 3 long, above 1, 2 high: the diagonals' middles lie 1 apart; doubled, over the shorter midline of 2.
    hydro = warped(size=1)
    hydro.state.x[:], hydro.state.y[:] = [[0.0, 3.0], [1.0, 2.0]], [[0.0, 0.0], [2.0, 2.0]]
    channels = dict(zip(CHANNELS, sample_channels(hydro.state, hydro.gas, hydro.coefficients)[:, 0, 0], strict=True))
    assert channels["taper"] == pytest.approx(1.0)
    assert channels["log aspect ratio"] == pytest.approx(0.0, abs=1e-7)
    assert channels["log edge ratio"] == pytest.approx(np.log(3.0))


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
