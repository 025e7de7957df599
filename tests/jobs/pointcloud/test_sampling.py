"""Points lie uniformly on a mesh; what an epoch draws follows from seed, epoch and sample."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.pointcloud.off import TriangleMesh
from distconv.jobs.pointcloud.sampling import (
    CACHED_POINTS,
    draw_points,
    points_in_triangles,
    random_triangles,
    surface_points,
)
from distconv.jobs.pointcloud.surfaces import ball
from tests.jobs.approved import assert_approved, weighted

FAN = TriangleMesh(
    np.array([(0.0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 4), (9, 9, 9)]),
    np.array([(0, 1, 2), (0, 0, 1), (0, 2, 3), (0, 3, 1)]),
)


def test_triangles_are_chosen_by_their_share_of_the_area() -> None:
    count = 100_000
    shares = np.bincount(random_triangles(FAN, count, np.random.default_rng(0)), minlength=4) / count
    expected = np.array([0.5, 0, 2, 2]) / 4.5  # worked out by hand; the second triangle is a line
    assert shares[1] == 0
    assert np.abs(shares - expected).max() < 4 * np.sqrt(0.25 / count)


def test_points_are_uniform_within_a_triangle() -> None:
    count = 100_000
    x, y, z = points_in_triangles(FAN, np.zeros(count, np.int64), np.random.default_rng(1)).T
    assert (x >= 0).all() and (y >= 0).all() and (x + y <= 1 + 1e-12).all() and (z == 0).all()
    # The four triangles between the middles of the sides have a quarter of the points each.
    quarters = [x > 0.5, y > 0.5, x + y < 0.5]
    for inside in quarters:
        assert inside.mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.19 / count))


def test_moments_of_points_on_a_sphere_are_those_of_the_sphere() -> None:
    points = surface_points(ball(), 50_000, seed=3, sample=0)
    assert points.dtype == np.float32
    assert np.abs(points.mean(0)).max() < 0.02
    assert np.abs(np.cov(points.T) - np.eye(3) / 3).max() < 0.02


@pytest.mark.parametrize(
    ("available", "count", "keep", "taken"),
    [
        (CACHED_POINTS, 4096, 1, 4096),
        (CACHED_POINTS, 4096, 0.25, 1024),
        (1024, 4096, 0.5, 512),
        (7, 7, 1, 7),
        (9, 4, 0, 0),
    ],
)
def test_a_share_of_the_points_is_drawn_each_once(available: int, count: int, keep: float, taken: int) -> None:
    indices = draw_points(available, count, keep, seed=0, epoch=1, sample=2)
    assert len(set(indices.tolist())) == len(indices) == taken
    assert all(0 <= index < available for index in indices)


def test_draws_and_surface_points_of_seeds_epochs_and_samples_are_as_approved() -> None:
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    lines = []
    for seed, epoch, sample in places:
        found = draw_points(100, 5, seed=seed, epoch=epoch, sample=sample).tolist()
        varied = draw_points(100, 50, 0.2, varied=True, seed=seed, epoch=epoch, sample=sample).tolist()
        lines.append(f"{seed} {epoch} {sample}: {found}, {varied}, {weighted(surface_points(FAN, 50, seed, sample))}")
    assert_approved("pointcloud/draws", "\n".join(lines))


def test_a_varied_share_is_uniform_up_to_keep_and_follows_from_the_same() -> None:
    clouds = 4000
    taken = np.array([len(draw_points(500, 200, 0.5, varied=True, seed=3, epoch=1, sample=s)) for s in range(clouds)])
    assert taken.min() >= 1 and taken.max() <= 100
    # Of theta in [0, 1/2] a quarter of 200 in the mean; each tenth of the range has a tenth of the clouds.
    assert abs(taken.mean() - 50) < 4 * 100 / np.sqrt(12 * clouds)
    tenths = np.histogram(taken, bins=np.linspace(0, 100, 11))[0] / clouds
    assert np.abs(tenths - 0.1).max() < 0.03
    again = draw_points(500, 200, 0.5, varied=True, seed=3, epoch=1, sample=7)
    assert len(again) == taken[7] and len(set(again.tolist())) == len(again)


def test_every_point_is_drawn_as_often_as_the_others() -> None:
    epochs = 2000
    counts = sum(np.bincount(draw_points(20, 10, 0.5, seed=0, epoch=e, sample=0), minlength=20) for e in range(epochs))
    assert np.abs(counts / epochs - 0.25).max() < 5 * np.sqrt(0.19 / epochs)


@pytest.mark.parametrize("keep", [-0.1, 1.5, float("nan")])
def test_a_share_beyond_0_and_1_is_refused(keep: float) -> None:
    with pytest.raises(DataError, match=rf"keep must lie between 0 and 1 \(keep={keep}"):
        draw_points(10, 5, keep, seed=0, epoch=0, sample=0)
