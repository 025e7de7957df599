"""The Lagrangian code: conservation, exact solutions, symmetry, and the labels made with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.hydro.advance import internal_work
from distconv.jobs.mesh.hydro.cell_geometry import (
    corner_volumes,
    extreme_jacobians,
    lower_to_minimum_jacobian,
    quad_area,
    sine,
)
from distconv.jobs.mesh.hydro.exact_solutions import SOD, blast_constant
from distconv.jobs.mesh.hydro.initial_conditions import CELLS_PER_UNIT, FAMILIES, initial_condition
from distconv.jobs.mesh.hydro.jit import Floats
from distconv.jobs.mesh.hydro.solver import Hydro, Initial, RunStopped
from distconv.jobs.mesh.hydro.state import Coefficients
from distconv.jobs.mesh.production.channels import extrapolated_jacobian
from distconv.jobs.mesh.production.run import Criteria, perform_run, run_seed


def box(columns: int, rows: int, cell: float) -> tuple[Floats, Floats]:
    """Nodes of a regular mesh."""
    x, y = np.meshgrid(np.arange(columns + 1) * cell, np.arange(rows + 1) * cell)
    return x, y


def at_rest(x: Floats, y: Floats, density: Floats, pressure: Floats, gamma: float = 1.4) -> Initial:
    return Initial(x, y, np.zeros_like(x), np.zeros_like(x), density, pressure, np.full_like(density, gamma))


def warped(seed: int = 0, size: int = 6) -> Hydro:
    """A gas at rest on a mesh of irregular cells."""
    x, y = box(size, size, 1.0)
    rng = np.random.default_rng(seed)
    x[1:-1, 1:-1] += rng.uniform(-0.2, 0.2, (size - 1, size - 1))
    y[1:-1, 1:-1] += rng.uniform(-0.2, 0.2, (size - 1, size - 1))
    cells = (size, size)
    return Hydro(at_rest(x, y, rng.uniform(0.5, 2.0, cells), rng.uniform(0.5, 2.0, cells)))


# Conservation


def conservation_run(work_velocity: str) -> tuple[float, float]:
    """Relative errors of total energy and of total volume after a run through shocks until the mesh is tangled."""
    start = initial_condition("blasts", 48, run_seed(1, 0, 4, 0))
    hydro = Hydro(start, work_velocity=work_velocity)
    energy, area = hydro.total_energy(), (48 / CELLS_PER_UNIT) ** 2
    hydro.run(0.15)
    assert hydro.steps > 100
    return abs(hydro.total_energy() / energy - 1.0), abs(float(hydro.volumes().sum()) / area - 1.0)


def test_total_energy_and_volume_are_constant_to_round_off() -> None:
    energy_error, volume_error = conservation_run("mean")
    assert energy_error < 1e-12
    assert volume_error < 1e-12


def test_work_by_the_end_velocity_would_fail_the_energy_test() -> None:
    energy_error, volume_error = conservation_run("end")
    assert energy_error > 1e-6
    assert volume_error < 1e-12


def test_forces_of_a_cell_sum_to_zero() -> None:
    hydro = warped()
    rng = np.random.default_rng(1)
    hydro.state.u[:] = rng.normal(size=hydro.state.u.shape)
    hydro.state.v[:] = rng.normal(size=hydro.state.v.shape)
    hydro._forces(hydro.state)
    scale = np.abs(hydro._fx).max()
    assert np.abs(hydro._fx.sum(0)).max() < 1e-13 * scale
    assert np.abs(hydro._fy.sum(0)).max() < 1e-13 * scale


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


# Forces


def test_corner_volumes_sum_to_the_areas() -> None:
    hydro = warped()
    np.testing.assert_allclose(corner_volumes(hydro.state.x, hydro.state.y).sum(0), hydro.volumes(), rtol=1e-13)


def test_subzonal_forces_are_derivatives_of_the_corner_volumes() -> None:
    # One gas in a parallelogram sheared from a square: each subzone keeps its share of the area, so nothing acts; then
    # one node is moved, and the work against the forces is compared with the subzones' change of volume.
    x, y = box(1, 1, 1.0)
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
    pressures = stiffness * (1.0 - shares / 0.25)
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
    """What the corner forces along x gain when the nodes get the velocities ``u, v``."""
    hydro._forces(hydro.state)
    at_rest = hydro._fx.copy()
    hydro.state.u[:], hydro.state.v[:] = u, v
    hydro._forces(hydro.state)
    return hydro._fx - at_rest


def test_uniform_compression_meets_no_viscosity() -> None:
    x, y = box(6, 6, 1.0)
    one = np.ones((6, 6))
    smooth = forces_of_motion(Hydro(at_rest(x, y, one, one)), -0.3 * (x - 3.0), -0.3 * (y - 3.0))
    assert np.abs(smooth).max() < 1e-14
    sudden = forces_of_motion(Hydro(at_rest(x, y, one, one)), np.where(x < 2.5, 1.0, 0.0), 0.0 * y)
    assert np.abs(sudden).max() > 0.1


def test_linear_velocity_meets_no_hourglass_damping_in_cells_of_any_shape() -> None:
    hydro = warped()
    hydro.coefficients = Coefficients(0.0, 0.0, 0.1, 0.0)
    x, y = hydro.state.x, hydro.state.y
    assert np.abs(forces_of_motion(hydro, 0.3 * x - 0.2 * y, 0.1 * x + 0.5 * y)).max() < 1e-14
    assert np.abs(forces_of_motion(hydro, x * y, x * y)).max() > 1e-3


# Exact solutions


def sod_error(cells: int) -> float:
    """L1 error of density at time 0.2 on a strip of the given length in cells."""
    x, y = box(cells, 2, 1.0 / cells)
    left = np.tile(np.arange(cells) < cells // 2, (2, 1))
    hydro = Hydro(at_rest(x, y, np.where(left, 1.0, 0.125), np.where(left, 1.0, 0.1)))
    hydro.run(0.2)
    nodes = hydro.state.x[0]
    exact = SOD.density((0.5 * (nodes[1:] + nodes[:-1]) - 0.5) / 0.2)
    return float(np.sum(np.abs(hydro.density()[0] - exact) * np.diff(nodes)))


def test_exact_shock_tube_satisfies_the_jump_conditions() -> None:
    pressure, velocity = SOD.star()
    just_right, just_left = SOD.density(np.array([velocity + 1e-9, velocity - 1e-9]))
    # Mass and momentum through the shock; entropy through the rarefaction.
    shock = velocity * just_right / (just_right - 0.125)
    assert 0.125 * shock * velocity == pytest.approx(pressure - 0.1, rel=1e-9)
    assert SOD.density(np.array([shock + 1e-9, shock - 1e-9])) == pytest.approx([0.125, just_right], rel=1e-6)
    assert pressure / just_left**1.4 == pytest.approx(1.0, rel=1e-12)


def test_shock_tube_converges_with_order_one() -> None:
    errors = np.array([sod_error(cells) for cells in (100, 200, 400)])
    assert errors[0] <= 6e-3
    assert (np.log2(errors[:-1] / errors[1:]) >= 0.85).all()


@cache
def blast_errors(cells: int) -> tuple[float, Floats]:
    """Relative errors of the radius of a cylindrical blast: of its mean, and of the 8 sectors of a quadrant.

    All energy starts in the cell at the origin, so that the exact shock has radius 1 at time 1. The radius in a sector
    is where its density, averaged over rings one cell wide, passes half the jump of a strong shock, from outside.
    """
    side, gamma = 1.2, 1.4
    cell = side / cells
    x, y = box(cells, cells, cell)
    pressure = np.full((cells, cells), 1e-6)
    pressure[0, 0] = 0.25 * blast_constant(gamma) * (gamma - 1.0) / cell**2
    hydro = Hydro(at_rest(x, y, np.ones((cells, cells)), pressure, gamma))
    hydro.run(1.0)
    centre_x, centre_y = (
        0.25 * (a[1:, 1:] + a[1:, :-1] + a[:-1, 1:] + a[:-1, :-1]) for a in (hydro.state.x, hydro.state.y)
    )
    radius, angle = np.hypot(centre_x, centre_y), np.arctan2(centre_y, centre_x)
    rings = np.arange(0.5, side, cell)
    half_jump = 0.5 * (1.0 + (gamma + 1.0) / (gamma - 1.0))
    radii = []
    for sector in range(8):
        inside = (angle >= sector * np.pi / 16) & (angle < (sector + 1) * np.pi / 16)
        number = np.histogram(radius[inside], rings)[0]
        density = np.histogram(radius[inside], rings, weights=hydro.density()[inside])[0][number > 0]
        middle = (0.5 * (rings[1:] + rings[:-1]))[number > 0]
        density /= number[number > 0]
        last = np.flatnonzero(density > half_jump)[-1]
        share = (density[last] - half_jump) / (density[last] - density[last + 1])
        radii.append(middle[last] + share * (middle[last + 1] - middle[last]))
    return abs(float(np.mean(radii)) - 1.0), np.abs(np.array(radii) - 1.0)


def test_blast_constant_does_not_depend_on_the_integration_step() -> None:
    assert blast_constant(1.4, 1000) == pytest.approx(blast_constant(1.4, 4000), rel=1e-6)


def test_blast_front_is_where_the_similarity_solution_has_it() -> None:
    mean, sectors = blast_errors(64)
    assert mean < 0.015
    assert (sectors < 0.025).all()


def test_blast_error_falls_with_the_cell_size() -> None:
    assert blast_errors(64)[0] < blast_errors(32)[0]


# Symmetry and reproducibility


def mirrored(start: Initial, side: float) -> Initial:
    """The initial condition seen in a mirror at x = side / 2."""
    cells = {name: np.flip(getattr(start, name), 1).copy() for name in ("density", "pressure", "gamma")}
    nodes = {name: np.flip(getattr(start, name), 1).copy() for name in ("x", "y", "u", "v")}
    return Initial(side - nodes["x"], nodes["y"], -nodes["u"], nodes["v"], **cells)


def test_a_mirrored_flow_stays_mirrored() -> None:
    start = initial_condition("triple-point", 32, run_seed(3, 0, 3, 0))
    one, other = Hydro(start), Hydro(mirrored(start, 32 / CELLS_PER_UNIT))
    for hydro in (one, other):
        hydro.run(0.03)
    assert one.steps > 20
    np.testing.assert_allclose(np.flip(other.state.u, 1), -one.state.u, atol=1e-10)
    np.testing.assert_allclose(np.flip(other.state.v, 1), one.state.v, atol=1e-10)
    np.testing.assert_allclose(np.flip(other.state.energy, 1), one.state.energy, rtol=1e-10)


def test_a_transposed_flow_stays_transposed() -> None:
    start = initial_condition("vortices", 32, run_seed(3, 0, 1, 0))
    turned = Initial(start.y.T.copy(), start.x.T.copy(), start.v.T.copy(), start.u.T.copy(),
                     start.density.T.copy(), start.pressure.T.copy(), start.gamma.T.copy())  # fmt: skip
    one, other = Hydro(start), Hydro(turned)
    for hydro in (one, other):
        hydro.run(0.03)
    np.testing.assert_allclose(other.state.u.T, one.state.v, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_fixes_the_initial_condition(family: str) -> None:
    first, again, other = (initial_condition(family, 32, run_seed(0, 0, 0, index)) for index in (0, 0, 1))
    np.testing.assert_array_equal(first.u, again.u)
    np.testing.assert_array_equal(first.density, again.density)
    assert np.abs(first.u - other.u).max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_cells_keep_their_size_whatever_the_number(family: str) -> None:
    for size in (32, 96):
        start = initial_condition(family, size, run_seed(0, 0, 0, 0))
        assert start.x[0, -1] == pytest.approx(size / CELLS_PER_UNIT)
        hydro = Hydro(start)
        assert np.sqrt(hydro.volumes().mean()) == pytest.approx(1.0 / CELLS_PER_UNIT)
        # A smooth perturbation: cells are neither slivers nor squares.
        smallest = extreme_jacobians(start.x, start.y)[0].min()
        assert 0.7 < smallest < 0.9999


@pytest.mark.parametrize("family", ["taylor-green", "vortices", "shear"])
def test_flows_are_transonic(family: str) -> None:
    for index in range(6):
        start = initial_condition(family, 128, run_seed(0, 0, 0, index))
        sound = np.sqrt(start.gamma * start.pressure / start.density).mean()
        # The nominal range is 0.5 to 1.2 at unit density.
        assert 0.4 < np.quantile(np.hypot(start.u, start.v), 0.99) / sound < 1.5


# Labels


def test_sine_of_a_corner() -> None:
    assert sine(1.0, 0.0, 0.0, 2.0) == 1.0
    assert sine(1.0, 0.0, 1.0, 1.0) == pytest.approx(np.sqrt(0.5))
    assert sine(1.0, 0.0, 1.0, -1.0) < 0.0
    assert sine(0.0, 0.0, 1.0, 1.0) == -1.0
    assert quad_area(0.0, 0.0, 2.0, 0.0, 2.0, 3.0, 0.0, 3.0) == 6.0


def test_labels_are_what_every_step_of_the_run_says() -> None:
    seed, criteria = run_seed(0, 0, 1, 0), Criteria()
    result = perform_run("vortices", 64, seed, criteria)
    assert len(result.samples) == 2
    assert result.samples[1].time - result.samples[0].time >= criteria.tau / 2 - 1e-12
    hydro = Hydro(initial_condition("vortices", 64, seed))
    history = [(0.0, 0, extreme_jacobians(hydro.state.x, hydro.state.y)[0])]
    for stop in range(1, 40):
        while hydro.time < 0.5 * criteria.tau * stop:
            hydro.step(0.5 * criteria.tau * stop)
            history.append((hydro.time, hydro.steps, extreme_jacobians(hydro.state.x, hydro.state.y)[0]))
        if hydro.time > result.end_time - 1e-12:
            break
    for sample in result.samples:
        until = sample.time + criteria.tau + 1e-12
        window = np.min([j for time, _, j in history if sample.time - 1e-12 <= time <= until], axis=0)
        np.testing.assert_array_equal(sample.label, (window.astype(np.float32) < np.float32(0.4)).astype(np.uint8))
        now = next(j for _, step, j in history if step == sample.step)
        np.testing.assert_array_equal(sample.channels[12], now.astype(np.float32))
        assert np.mean(now < criteria.bad) < criteria.most_bad
        assert sample.label.mean() >= criteria.least_labelled
        assert sample.inversions == np.count_nonzero(window <= 0.0)


def test_a_snapshot_with_too_few_labels_is_rejected() -> None:
    result = perform_run("vortices", 32, run_seed(0, 0, 1, 0), Criteria(least_labelled=1.1, last_time=0.2))
    assert result.samples == []
    assert result.quiet > 0


def test_extrapolation_is_exact_where_velocities_do_not_change() -> None:
    hydro = warped()
    hydro.state.u[:] = 0.5 * hydro.state.y
    record = np.full(hydro.state.energy.shape, 2.0, np.float32)
    for time in np.linspace(0.0, 0.3, 21):
        lower_to_minimum_jacobian(hydro.state.x + time * hydro.state.u, hydro.state.y, record)
    np.testing.assert_array_equal(extrapolated_jacobian(hydro.state, 0.3), record)


# What cannot go on


def test_a_run_stops_when_a_cell_loses_its_energy() -> None:
    hydro = warped()
    hydro.state.energy[2, 3] = -1.0
    with pytest.raises(RunStopped, match=r"step 1: cell \(2, 3\) lost its area or energy"):
        hydro.step(1.0)


def test_an_initial_condition_without_pressure_is_refused() -> None:
    x, y = box(4, 4, 1.0)
    start = at_rest(x, y, np.ones((4, 4)), np.ones((4, 4)))
    with pytest.raises(DataError, match="must be positive"):
        Hydro(replace(start, pressure=np.zeros((4, 4))))
