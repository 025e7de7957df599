"""Geometry of cells: areas, corner volumes, sines of corners."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh.hydro.cell_geometry import (
    corner_volumes,
    lower_to_minimum_jacobian,
    quad_area,
    sine,
)
from tests.jobs.mesh.hydro.gases import warped

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_corner_volumes_sum_to_the_areas() -> None:
    hydro = warped()
    np.testing.assert_allclose(corner_volumes(hydro.state.x, hydro.state.y).sum(0), hydro.volumes(), rtol=1e-13)


def test_sine_of_a_corner() -> None:
    assert sine(1.0, 0.0, 0.0, 2.0) == 1.0
    assert sine(1.0, 0.0, 1.0, 1.0) == pytest.approx(np.sqrt(0.5))
    assert sine(1.0, 0.0, 1.0, -1.0) < 0.0
    assert sine(0.0, 0.0, 1.0, 1.0) == -1.0
    assert quad_area(0.0, 0.0, 2.0, 0.0, 2.0, 3.0, 0.0, 3.0) == 6.0


def test_a_record_keeps_the_smallest_that_it_has_seen() -> None:
    square, flat = np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [1.0, 2.0]])
    y = np.array([[0.0, 0.0], [1.0, 1.0]])
    record = np.full((1, 1), 2.0, np.float32)
    for x, expected in ((square, 1.0), (flat, 0.5**0.5), (square, 0.5**0.5)):
        lower_to_minimum_jacobian(x, y, record)
        assert record[0, 0] == np.float32(expected)
