"""Triangles are drawn by their area; drawn points follow from seed, epoch and sample, as approved."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.pointcloud.off import TriangleMesh
from distconv.jobs.pointcloud.sampling import (
    CACHED_POINTS,
    draw_points,
    random_triangles,
    surface_points,
)
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


@pytest.mark.parametrize("keep", [-0.1, 1.5, float("nan")])
def test_a_share_beyond_0_and_1_is_refused(keep: float) -> None:
    with pytest.raises(DataError, match=rf"keep must lie between 0 and 1 \(keep={keep}"):
        draw_points(10, 5, keep, seed=0, epoch=0, sample=0)
