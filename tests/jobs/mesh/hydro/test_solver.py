"""The Lagrangian code as a whole: conservation, convergence to exact solutions, symmetry, runs that cannot go on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.hydro.exact_solutions import SOD, blast_constant
from distconv.jobs.mesh.hydro.initial_conditions import CELLS_PER_UNIT, initial_condition
from distconv.jobs.mesh.hydro.solver import Hydro, Initial, RunStopped, node_masses
from distconv.jobs.mesh.production.run import run_seed
from tests.jobs.mesh.hydro.gases import at_rest, box, warped

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


@pytest.mark.long
@pytest.mark.parametrize(("work_velocity", "low", "high"), [("mean", 0.0, 1e-12), ("end", 1e-6, 1.0)])
def test_total_energy_is_constant_through_shocks_if_nodes_work_at_their_mean_velocity(
    work_velocity: str, low: float, high: float
) -> None:
    """Until the mesh is tangled; the volume is constant in any case."""
    start = initial_condition("blasts", 48, run_seed(1, 0, 4, 0))
    hydro = Hydro(start, work_velocity=work_velocity)
    energy, area = hydro.total_energy(), (48 / CELLS_PER_UNIT) ** 2
    hydro.run(0.15)
    assert hydro.steps > 100
    assert low <= abs(hydro.total_energy() / energy - 1.0) < high
    assert float(hydro.volumes().sum()) == pytest.approx(area, rel=1e-12)


def test_a_few_steps_on_irregular_cells_keep_total_energy_and_volume() -> None:
    hydro = warped()
    rng = np.random.default_rng(1)
    hydro.state.u[:, 1:-1], hydro.state.v[1:-1] = 0.5 * rng.normal(size=(7, 5)), 0.5 * rng.normal(size=(5, 7))
    energy, kinetic = hydro.total_energy(), hydro.kinetic_energy()
    for _ in range(10):
        hydro.step(1.0)
    assert abs(hydro.kinetic_energy() - kinetic) > 0.01 * energy
    assert hydro.total_energy() == pytest.approx(energy, rel=1e-14)
    assert float(hydro.volumes().sum()) == pytest.approx(36.0, rel=1e-14)


def sod_error(cells: int) -> float:
    """L1 error of density at time 0.2 on a strip of the given length in cells."""
    x, y = box(cells, 2, 1.0 / cells)
    left = np.tile(np.arange(cells) < cells // 2, (2, 1))
    hydro = Hydro(at_rest(x, y, np.where(left, 1.0, 0.125), np.where(left, 1.0, 0.1)))
    hydro.run(0.2)
    nodes = hydro.state.x[0]
    exact = SOD.density((0.5 * (nodes[1:] + nodes[:-1]) - 0.5) / 0.2)
    return float(np.sum(np.abs(hydro.density()[0] - exact) * np.diff(nodes)))


def test_shock_tube_converges_with_order_one() -> None:
    errors = np.array([sod_error(cells) for cells in (100, 200, 400)])
    assert errors[0] <= 6e-3
    assert (np.log2(errors[:-1] / errors[1:]) >= 0.85).all()


def test_blast_front_is_where_the_similarity_solution_has_it() -> None:
    """All energy starts in the cell at the origin, so that the exact shock has radius 1 at time 1.

    In each of 8 sectors of a quadrant, the shock is where the density, averaged over rings one cell wide, passes half
    the jump of a strong shock, from outside.
    """
    cells, side, gamma = 64, 1.2, 1.4
    cell = side / cells
    pressure = np.full((cells, cells), 1e-6)
    pressure[0, 0] = 0.25 * blast_constant(gamma) * (gamma - 1.0) / cell**2
    hydro = Hydro(at_rest(*box(cells, cells, cell), np.ones((cells, cells)), pressure, gamma))
    hydro.run(1.0)
    x, y = (0.25 * (a[1:, 1:] + a[1:, :-1] + a[:-1, 1:] + a[:-1, :-1]) for a in (hydro.state.x, hydro.state.y))
    radius, sector = np.hypot(x, y), np.floor(np.arctan2(y, x) * 16 / np.pi)
    rings = np.arange(0.5, side, cell)
    half_jump = 0.5 * (1.0 + (gamma + 1.0) / (gamma - 1.0))
    radii = []
    for inside in (sector == number for number in range(8)):
        number = np.histogram(radius[inside], rings)[0]
        density = np.histogram(radius[inside], rings, weights=hydro.density()[inside])[0][number > 0]
        middle = (0.5 * (rings[1:] + rings[:-1]))[number > 0]
        density /= number[number > 0]
        last = np.flatnonzero(density > half_jump)[-1]
        share = (density[last] - half_jump) / (density[last] - density[last + 1])
        radii.append(middle[last] + share * (middle[last + 1] - middle[last]))
    assert abs(np.mean(radii) - 1.0) < 0.015
    assert (np.abs(np.array(radii) - 1.0) < 0.025).all()


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


def test_walls_hold_what_flows_through_them_and_nothing_along_them() -> None:
    x, y = box(3, 3, 1.0)
    one = np.ones((3, 3))
    state = Hydro(replace(at_rest(x, y, one, one), u=np.full((4, 4), 2.0), v=np.full((4, 4), 3.0))).state
    np.testing.assert_array_equal(state.u, [[0, 2, 2, 0]] * 4)
    np.testing.assert_array_equal(state.v, [[0] * 4, [3] * 4, [3] * 4, [0] * 4])


def test_steps_begin_small_and_grow_by_a_fifth_until_they_are_stable() -> None:
    # Square cells of side 1 at rest: the highest frequency of one alone is 2 sqrt(2) c, and half of 2 / that is taken.
    x, y = box(4, 4, 1.0)
    one = np.ones((4, 4))
    hydro = Hydro(at_rest(x, y, one, one))
    stable = 0.5 * 2.0 / np.sqrt(8.0 * 1.4)
    expected = [min(1.0, 0.2 * 1.2**n) * stable for n in range(11)]
    assert [hydro.step(1e9) for _ in range(11)] == pytest.approx(expected, rel=1e-9)
    assert hydro.time == pytest.approx(sum(expected)) and hydro.steps == 11
    assert hydro.step(hydro.time + 0.001) == pytest.approx(0.001)


def test_a_node_has_the_subzones_around_it() -> None:
    masses = np.arange(1.0, 9.0).reshape(4, 1, 2)  # of two cells side by side, corners counter-clockwise
    np.testing.assert_array_equal(node_masses(masses), [[1, 2 + 3, 4], [7, 8 + 5, 6]])


def test_a_step_changes_no_volume_by_more_than_the_default_tenth() -> None:
    hydro = warped()
    hydro.state.u[:] = 50 * (hydro.state.x - hydro.state.x.mean())
    before = hydro.volumes()
    hydro.step(1.0)
    change = np.abs(hydro.volumes() / before - 1)
    assert 0 < change.max() < 0.12
