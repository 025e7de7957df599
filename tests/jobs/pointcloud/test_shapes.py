"""Embedded shapes: seeded, balanced, of the parts they say, and turned every way."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.pointcloud import shapes as shapes_module
from distconv.jobs.pointcloud.shapes import CLUTTER, HIDDEN, PART_NAMES, SHAPES, Shapes, _rotation
from tests.jobs.approved import assert_approved, weighted


def test_a_shape_follows_from_seed_group_and_index_alone() -> None:
    first, again = Shapes(30, 200, seed=5), Shapes(12, 200, seed=5)
    assert [np.array_equal(first[i].points, again[i].points) for i in (11, 3)] == [True, True]
    others = [Shapes(30, 200, seed=6)[3], Shapes(30, 200, seed=5, group=1)[3], first[13]]
    assert not any(np.array_equal(first[3].points, other.points) for other in others)


def test_classes_come_in_turn() -> None:
    shapes = Shapes(2 * len(SHAPES) + 1, 10)
    assert shapes.labels.tolist() == [*range(len(SHAPES)), *range(len(SHAPES)), 0]
    assert shapes[len(SHAPES)].label == 0
    assert shapes.class_names == tuple(SHAPES)


@pytest.mark.parametrize("label", range(len(SHAPES)), ids=list(SHAPES))
def test_points_are_finite_and_of_the_parts_of_their_class(label: int) -> None:
    wanted = set(SHAPES[list(SHAPES)[label]](np.random.default_rng(0)))
    for index in range(label, 5 * len(SHAPES), len(SHAPES)):
        cloud = Shapes(index + 1, 500)[index]
        assert cloud.points.shape == (500, 3) and cloud.points.dtype == np.float32
        assert np.isfinite(cloud.points).all()
        assert cloud.part is not None
        assert {PART_NAMES[part] for part in set(cloud.part.tolist()) - {0}} == wanted
        assert (cloud.part == 0).mean() <= CLUTTER


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


def test_every_point_is_of_the_part_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planet without what spoils it: its ball reaches to 0.65 at most, its ring begins at 0.9."""
    for name, value in (("WARP", 0), ("STRETCH", 1), ("BLUR", 0), ("CLUTTER", 0)):
        monkeypatch.setattr(shapes_module, name, value)
    planet = list(SHAPES).index("planet")
    cloud = Shapes(planet + 1, 2000)[planet]
    radius = np.linalg.norm(cloud.points, axis=1)
    assert cloud.part is not None
    assert np.array_equal(cloud.part == PART_NAMES.index("ring"), radius > 0.8)
    assert np.array_equal(cloud.part == PART_NAMES.index("ball"), radius < 0.7)


def test_clutter_lies_everywhere_around_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes_module, "CLUTTER", 1.0)
    cloud = Shapes(1, 4000)[0]
    assert cloud.part is not None
    clutter, largest = cloud.points[cloud.part == 0], np.abs(cloud.points[cloud.part > 0]).max()
    assert len(clutter) > 400
    assert clutter.min(0) == pytest.approx(-largest, rel=0.1) and clutter.max(0) == pytest.approx(largest, rel=0.1)
    assert np.abs(clutter.mean(0)).max() < 5 * largest / np.sqrt(3 * len(clutter))


def test_rotations_are_rotations_and_favour_no_direction() -> None:
    random = np.random.default_rng(0)
    turned = np.stack([_rotation(random) for _ in range(1000)])
    assert np.abs(turned @ turned.transpose(0, 2, 1) - np.eye(3)).max() < 1e-12
    assert np.abs(np.linalg.det(turned) - 1).max() < 1e-12
    assert np.abs(turned.mean(0)).max() < 5 * np.sqrt(1 / 3 / 1000)


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
