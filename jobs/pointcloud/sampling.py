"""Uniform sampling of points on a mesh, and of the points of a cloud in an epoch.

As in the SparsePipe paper, 16,384 points are sampled on each mesh and stored. An epoch draws 4,096 of them at random
and keeps a fraction (point dropout). All results depend on their arguments alone, so they are identical on all ranks.

Source: SparsePipe, section IV-A (sampling) and IV-B (dropout).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distconv.errors import DataError

from .off import TriangleMesh

CACHED_POINTS, DRAWN_POINTS = 16_384, 4_096

_SURFACE, _DRAW = 0, 1
"""Independent streams of random numbers."""


def surface_points(mesh: TriangleMesh, count: int, seed: int, sample: int) -> NDArray[np.float32]:
    """Return points that are independent and uniformly distributed over a surface.

    Parameters
    ----------
    mesh : TriangleMesh
        The surface.
    count : int
        Number of points.
    seed, sample : int
        Seed and index of the sample; the points depend on nothing else.

    Returns
    -------
    ndarray of float32, shape (count, 3)
        The points.
    """
    random = np.random.default_rng((seed, _SURFACE, sample))
    return points_in_triangles(mesh, random_triangles(mesh, count, random), random).astype(np.float32)


def chosen_points(points: NDArray[np.float64], count: int, seed: int, sample: int) -> NDArray[np.float32]:
    """Return a number of the points of a cloud.

    Parameters
    ----------
    points : ndarray of float64, shape (P, 3)
        The cloud, with at least one point.
    count : int
        Number of points.
    seed, sample : int
        Seed and index of the sample; the points depend on nothing else.

    Returns
    -------
    ndarray of float32, shape (count, 3)
        Random points without repetition, if there are as many. Otherwise all points, and random ones again.
    """
    random = np.random.default_rng((seed, _SURFACE, sample))
    rows = random.permutation(len(points))[:count]
    again = random.choice(len(points), count - len(rows))
    return np.asarray(points[np.concatenate([rows, again])], np.float32)


def random_triangles(mesh: TriangleMesh, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return random triangles, each with a probability proportional to its area.

    Parameters
    ----------
    mesh : TriangleMesh
        The triangles.
    count : int
        Number of triangles.
    random : numpy.random.Generator
        Source of random numbers.

    Returns
    -------
    ndarray of int64, shape (count,)
        Indices of triangles.
    """
    # With side="right" a triangle without area is never chosen.
    below = np.cumsum(mesh.areas)
    return np.asarray(np.searchsorted(below, random.random(count) * below[-1], side="right"), np.int64)


def points_in_triangles(
    mesh: TriangleMesh, triangles: NDArray[np.int64], random: np.random.Generator
) -> NDArray[np.float64]:
    """Return a point in each of the given triangles, uniformly distributed.

    Parameters
    ----------
    mesh : TriangleMesh
        The mesh.
    triangles : ndarray of int64, shape (P,)
        Indices of triangles, with repetitions.
    random : numpy.random.Generator
        Source of random numbers.

    Returns
    -------
    ndarray of float64, shape (P, 3)
        The points.
    """
    a, b, c = (mesh.vertices[corner[triangles]] for corner in mesh.triangles.T)
    along = random.random((2, len(triangles), 1))
    # Points of the parallelogram outside the triangle are reflected through the midpoint of their common side.
    u, v = np.where(along.sum(0) > 1, 1 - along, along)
    return np.asarray(a + u * (b - a) + v * (c - a))


def draw_points(
    available: int,
    count: int,
    keep: float = 1.0,
    *,
    varied: bool = False,
    seed: int,
    epoch: int,
    sample: int,
) -> NDArray[np.int64]:
    """Return the indices of the points of a cloud that an epoch uses.

    Parameters
    ----------
    available : int
        Number of points of the cloud.
    count : int
        Number of points to draw before dropout; all points if the cloud has fewer.
    keep : float
        Fraction of the drawn points that is kept, 0 to 1: the point sampling ratio p of the paper's Table II.
    varied : bool
        If True, the fraction is drawn uniformly from 0 to ``keep``, and at least one point is kept. The paper calls it
        theta. At ``keep=1`` half of the points are dropped on average.
    seed, epoch, sample : int
        Seed, epoch and index of the cloud; the result depends on nothing else.

    Returns
    -------
    ndarray of int64
        Indices without repetitions, in random order.

    Raises
    ------
    DataError
        If ``keep`` is not between 0 and 1.
    """
    if not 0 <= keep <= 1:
        raise DataError(f"point dropout: keep must lie between 0 and 1 (keep={keep})")
    random = np.random.default_rng((seed, _DRAW, epoch, sample))
    whole = min(count, available)
    kept = max(1, round(keep * random.random() * whole)) if varied else round(keep * whole)
    return random.choice(available, kept, replace=False)
