"""The kernels of a time step, each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.advance import first_broken_cell, internal_work, move_nodes, predict_nodes, stable_step
from distconv.jobs.mesh.hydro.cell_geometry import quad_area
from distconv.jobs.mesh.hydro.solver import Hydro
from tests.jobs.mesh.hydro.gases import at_rest, warped

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_the_stable_step_of_a_cell_is_two_over_its_highest_frequency() -> None:
    corners = np.array([[0.0, 0.0], [1.1, 0.1], [0.9, 1.2], [-0.1, 0.8]])
    x, y = (corners[[0, 1, 3, 2], axis].reshape(2, 2).copy() for axis in (0, 1))
    hydro = Hydro(at_rest(x, y, np.full((1, 1), 2.0), np.full((1, 1), 3.0)))
    moved = np.array([quad_area(*(corners + 1e-6 * step.reshape(4, 2)).ravel()) for step in np.eye(8)])
    growth = (moved - quad_area(*corners.ravel())) / 1e-6
    stiffness = 1.4 * 3.0 / quad_area(*corners.ravel()) * np.outer(growth, growth)
    roots = np.sqrt(np.repeat((hydro.gas.fraction * hydro.gas.mass)[:, 0, 0], 2))
    highest = np.linalg.eigvalsh(stiffness / np.outer(roots, roots)).max()
    assert stable_step(hydro.state, hydro.gas, 1.0, 0.1) == pytest.approx(2.0 / np.sqrt(highest), rel=1e-5)


def test_no_cell_changes_its_volume_by_more_than_is_allowed() -> None:
    hydro = warped()
    hydro.state.u[:] = 100.0 * hydro.state.x
    assert stable_step(hydro.state, hydro.gas, 1e9, 0.1) == pytest.approx(0.1 / 100.0)


def test_nodes_move_with_their_velocity_and_walls_take_up_the_force_across_them() -> None:
    hydro = warped()
    state, before, half = hydro.state, hydro.state.copy(), hydro.state.copy()
    rng = np.random.default_rng(3)
    fx, fy = rng.normal(size=(2, 4, *hydro.gas.mass.shape))
    move_nodes(state, hydro.gas, fx, fy, 0.5, half)
    np.testing.assert_array_equal(state.u[:, [0, -1]], before.u[:, [0, -1]])
    np.testing.assert_array_equal(state.v[[0, -1]], before.v[[0, -1]])
    pull = fx[0, 2, 3] + fx[1, 2, 2] + fx[2, 1, 2] + fx[3, 1, 3]  # of the four cells around node (2, 3)
    assert state.u[2, 3] == pytest.approx(before.u[2, 3] + 0.5 * pull / hydro.gas.node_mass[2, 3])
    np.testing.assert_allclose(state.x, before.x + 0.25 * (before.u + state.u), rtol=1e-14)


def test_half_a_step_earlier_nodes_have_half_of_the_push_and_go_with_it() -> None:
    hydro = warped()
    state, half = hydro.state, hydro.state.copy()
    rng = np.random.default_rng(4)
    state.u[1:-1, 1:-1], state.v[1:-1, 1:-1] = rng.normal(size=(2, 5, 5))
    fx, fy = rng.normal(size=(2, 4, *hydro.gas.mass.shape))
    predict_nodes(state, hydro.gas, fx, fy, 0.25, half)
    pull = fy[0, 2, 3] + fy[1, 2, 2] + fy[2, 1, 2] + fy[3, 1, 3]
    assert half.v[2, 3] == pytest.approx(state.v[2, 3] + 0.25 * pull / hydro.gas.node_mass[2, 3])
    np.testing.assert_allclose(half.x, state.x + 0.25 * half.u, rtol=1e-14)
    np.testing.assert_allclose(half.y, state.y + 0.25 * half.v, rtol=1e-14)


def test_work_is_force_times_way_at_each_corner() -> None:
    rng = np.random.default_rng(5)
    u, v = rng.normal(size=(2, 4, 6))
    (fx, fy), energy, mass = rng.normal(size=(2, 4, 3, 5)), rng.uniform(1, 2, (3, 5)), rng.uniform(1, 2, (3, 5))
    found = np.empty((3, 5))
    internal_work(energy, u, v, fx, fy, mass, 0.5, found)
    corners = (
        (slice(None, -1), slice(None, -1)),
        (slice(None, -1), slice(1, None)),
        (slice(1, None), slice(1, None)),
        (slice(1, None), slice(None, -1)),
    )  # round the cell
    power = sum(fx[k] * u[at] + fy[k] * v[at] for k, at in enumerate(corners))
    np.testing.assert_allclose(found, energy - 0.5 * power / mass, rtol=1e-13)


@pytest.mark.parametrize("energy", [0.0, -1.0, np.nan])
def test_a_cell_without_energy_is_found(energy: float) -> None:
    hydro = warped()
    assert first_broken_cell(hydro.state) == -1
    hydro.state.energy[2, 3] = energy
    assert first_broken_cell(hydro.state) == 2 * 6 + 3


def test_a_cell_that_is_turned_over_is_found() -> None:
    hydro = warped()
    hydro.state.x[3, 3], hydro.state.x[3, 4] = hydro.state.x[3, 4], hydro.state.x[3, 3]
    hydro.state.x[4, 3], hydro.state.x[4, 4] = hydro.state.x[4, 4], hydro.state.x[4, 3]
    assert first_broken_cell(hydro.state) == 3 * 6 + 3
