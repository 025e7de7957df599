"""Initial conditions: their fields as approved, cells of one size, flows without sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distconv.jobs.mesh.hydro.cell_geometry import (
    extreme_jacobians,
)
from distconv.jobs.mesh.hydro.initial_conditions import (
    CELLS_PER_UNIT,
    FAMILIES,
    Sketch,
    initial_condition,
    sound_pressure,
    spline_basis,
)
from distconv.jobs.mesh.hydro.solver import Hydro
from distconv.jobs.mesh.production.run import run_seed
from tests.jobs.approved import assert_approved, size_of

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fields_of_a_family_are_as_approved(family: str) -> None:
    lines = []
    for index in range(3):
        start = initial_condition(family, 32, run_seed(0, 0, 0, index))
        fields = {name: torch.from_numpy(getattr(start, name)) for name in ("density", "pressure", "gamma", "u", "v")}
        lines += [f"{index} {name}: {size_of(field)}" for name, field in fields.items()]
    assert_approved(f"initial-conditions/{family}", "\n".join(lines))


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


def sketch(size: int = 32) -> Sketch:
    return Sketch(np.random.default_rng(0), size)


def test_a_stream_function_makes_a_flow_of_the_speed_asked_for_without_sources() -> None:
    drawn = sketch()
    stream = drawn.smooth_noise(0.1, odd_at_walls=True)
    assert np.abs(stream[[0, -1]]).max() < 1e-12 and np.abs(stream[:, [0, -1]]).max() < 1e-12
    drawn.add_stream(stream, 0.5)
    assert np.sqrt(np.mean(drawn.u**2 + drawn.v**2)) == pytest.approx(0.5)
    cell = 1.0 / CELLS_PER_UNIT
    u_x, v_y = np.gradient(drawn.u, cell, axis=1), np.gradient(drawn.v, cell, axis=0)
    assert np.abs((u_x + v_y)[2:-2, 2:-2]).max() < 1e-9 * np.abs(u_x).max()


def test_splines_add_up_to_one_and_follow_a_line() -> None:
    basis = spline_basis(30, 5)
    assert basis.shape == (31, 8)
    np.testing.assert_allclose(basis.sum(1), 1.0, rtol=1e-13)
    np.testing.assert_allclose(basis @ np.arange(-1.0, 7.0), np.linspace(0.0, 5.0, 31), atol=1e-13)
    np.testing.assert_allclose(basis[0, :4], [1 / 6, 4 / 6, 1 / 6, 0], atol=1e-13)


def test_pressures_are_those_of_mach_numbers_from_a_half_to_one_and_a_fifth() -> None:
    drawn = sketch()
    gamma = float(drawn.gamma[0, 0])
    machs = [3.0 / np.sqrt(gamma * sound_pressure(drawn, 3.0)) for _ in range(400)]
    assert 0.5 <= min(machs) < 0.52 and 1.18 < max(machs) <= 1.2
