"""The surfaces have the areas and extents of what they are named after."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.pointcloud import surfaces
from distconv.jobs.pointcloud.off import TriangleMesh
from tests.jobs.approved import assert_approved, weighted

FAN = TriangleMesh(np.array([(0.0, 0, 0), (1, 0, 0), (0, 2, 0), (0, 0, 3)]), np.array([(0, 1, 2), (0, 2, 3)]))
SLANT = np.sqrt(5)
TURN = np.hypot(2 * np.pi, 1.0)


@pytest.mark.parametrize(
    ("mesh", "area", "extents"),
    [
        (surfaces.ball(), 4 * np.pi, (2, 2, 2)),
        (surfaces.ring(0.3), 4 * np.pi**2 * 0.3, (2.6, 2.6, 0.6)),
        (surfaces.rod(), 6 * np.pi, (2, 2, 2)),
        (surfaces.cone(), np.pi * (1 + SLANT), (2, 2, 2)),
        (surfaces.block(), 24, (2, 2, 2)),
        (surfaces.spring(3, 3, 0.1), 2 * np.pi * 0.1 * 3 * TURN, (2.2, 2.2, 3.2)),
    ],
    ids=["ball", "ring", "rod", "cone", "block", "spring"],
)
def test_area_and_extents_are_those_of_the_solid(mesh: TriangleMesh, area: float, extents: tuple[float, ...]) -> None:
    assert mesh.areas.sum() == pytest.approx(area, rel=0.04)
    assert np.ptp(mesh.vertices, axis=0) == pytest.approx(extents, rel=0.02)


def test_all_surfaces_are_as_approved() -> None:
    """A weight for each coordinate and index: a vertex or triangle in another place changes the sums."""
    made = {
        "ball": surfaces.ball(), "ring": surfaces.ring(0.3), "rod": surfaces.rod(), "cone": surfaces.cone(),
        "block": surfaces.block(), "spring": surfaces.spring(2.3, 1.7, 0.2),
        "moved": surfaces.scale_and_shift(surfaces.rod(), (1, 2, 3), (4, 5, 6)), "same": surfaces.scale_and_shift(FAN),
        "joined": surfaces.join_meshes([FAN, surfaces.cone(), FAN]),
    }  # fmt: skip
    lines = [f"{name}: {weighted(mesh.vertices)}; {weighted(mesh.triangles)}" for name, mesh in made.items()]
    assert_approved("pointcloud/surfaces", "\n".join(lines))
