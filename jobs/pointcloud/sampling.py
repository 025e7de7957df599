"""Points on a mesh, uniformly by area, and the points of a cloud that an epoch takes.

As the paper does: 16,384 points are sampled on each mesh and kept; of them an epoch takes 4,096 at random, of which a
share is kept (point dropout).

Source: SparsePipe, section IV-A (sampling) and IV-B (dropout).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distconv.errors import DataError

from .off import TriangleMesh

CACHED_POINTS, DRAWN_POINTS = 16_384, 4_096

_SURFACE, _DRAW = 0, 1
"""Streams of random numbers that must not repeat each other."""


def surface_points(mesh: TriangleMesh, count: int, seed: int, sample: int) -> NDArray[np.float32]:
    """``count`` points (count, 3), independent and uniform over the surface; they follow from seed and sample."""
    random = np.random.default_rng((seed, _SURFACE, sample))
    return points_on(mesh, chosen_triangles(mesh, count, random), random).astype(np.float32)


def chosen_triangles(mesh: TriangleMesh, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Indices of triangles (count), each as likely as its share of the area."""
    below = np.cumsum(mesh.areas)
    return np.asarray(np.searchsorted(below, random.random(count) * below[-1], side="right"), np.int64)


def points_on(mesh: TriangleMesh, triangles: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.float64]:
    """A point in each of ``triangles``, uniform over it."""
    a, b, c = (mesh.vertices[corner[triangles]] for corner in mesh.triangles.T)
    along = random.random((2, len(triangles), 1))
    # Points of the parallelogram that lie beyond the triangle are turned about the middle of its third side.
    u, v = np.where(along.sum(0) > 1, 1 - along, along)
    return np.asarray(a + u * (b - a) + v * (c - a))


def drawn(
    available: int,
    count: int,
    keep: float = 1.0,
    *,
    varied: bool = False,
    seed: int,
    epoch: int,
    sample: int,
) -> NDArray[np.int64]:
    """Indices of the points that this epoch takes of a cloud: a share ``keep`` of ``count``, or of all if it has fewer.

    They follow from seed, epoch and sample alone. ``keep`` is p, the point sampling ratio of the paper's Table II: 1
    keeps all points and 0 none, as its text says of p. ``varied``: the share is theta, drawn from 0 to p, of which the
    text also speaks; that drops half of the points at p = 1, in the mean. One point is left then at least.

    Raises
    ------
    DataError
        If ``keep`` is no share.
    """
    if not 0 <= keep <= 1:
        raise DataError(f"point dropout keeps a share of the points from 0 to 1, not {keep}")
    random = np.random.default_rng((seed, _DRAW, epoch, sample))
    whole = min(count, available)
    kept = max(1, round(keep * random.random() * whole)) if varied else round(keep * whole)
    return random.choice(available, kept, replace=False)
