"""Embedded shapes: hidden caps, and sizes and clouds of each class as approved."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.pointcloud import shapes as shapes_module
from distconv.jobs.pointcloud.shapes import HIDDEN, SHAPES, Shapes
from tests.jobs.approved import assert_approved, weighted


def test_a_cap_of_a_sphere_is_hidden_behind_a_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WARP", 0), ("STRETCH", 1), ("BLUR", 0), ("CLUTTER", 0)):
        monkeypatch.setattr(shapes_module, name, value)
    hidden = []
    for index in range(0, 5 * len(SHAPES), len(SHAPES)):
        points = Shapes(index + 1, 40_000)[index].points
        assert np.abs(np.linalg.norm(points, axis=1) - 1).max() < 0.02
        # A cap with the share s of the area is 2 s high; what is left of heights -1 to 1 - 2 s has its mean at -s.
        mean = points.mean(0)
        hidden.append(np.linalg.norm(mean))
        if hidden[-1] > 0.1:
            assert (points @ -mean / hidden[-1]).max() == pytest.approx(1 - 2 * hidden[-1], abs=0.05)
    assert 0.1 < max(hidden) < HIDDEN + 0.03


def test_sizes_of_the_parts_are_as_approved() -> None:
    lines = [
        f"{name} {part}: {np.round(np.ptp(mesh.vertices, axis=0), 3).tolist()}, {len(mesh.triangles)} triangles"
        for name, build in SHAPES.items()
        for part, mesh in build(np.random.default_rng(0)).items()
    ]
    assert_approved("pointcloud/shapes", "\n".join(lines))


def test_clouds_of_each_class_are_as_approved() -> None:
    lines = []
    for index, name in enumerate(SHAPES):
        cloud = Shapes(10, 300, seed=2, group=1)[index]
        lines.append(f"{name}: {weighted(cloud.points)}, parts {np.bincount(cloud.part, minlength=7).tolist()}")
    assert_approved("pointcloud/clouds", "\n".join(lines))
