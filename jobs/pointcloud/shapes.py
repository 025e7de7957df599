"""Labelled shapes generated from a seed, for runs without a data set.

A shape is composed of a few surfaces. It is warped, stretched, rotated at random and sampled uniformly by area. Part of
it is hidden as if seen from one side, and noise and clutter are added. No single point identifies a class and no
direction is up. A perceptron on single points is therefore less accurate than a network with neighborhoods.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from . import surfaces
from .clouds import Cloud
from .off import TriangleMesh
from .sampling import points_in_triangles, random_triangles
from .surfaces import ball, block, cone, ring, rod, scale_and_shift, spring

Array = NDArray[np.float64]
Random = np.random.Generator
Parts = dict[str, TriangleMesh]

HIDDEN, BLUR, CLUTTER = 0.3, 0.015, 0.04
"""Largest fraction of hidden points; noise (standard deviation over largest radius); fraction of clutter."""
STRETCH, WARP = 1.4, 0.12
"""Largest factor along a dimension, and largest amplitude of the wave that warps a shape."""
PART_NAMES = ("clutter", "ball", "ring", "rod", "cone", "block", "spring")


def _dumbbell(random: Random) -> Parts:
    radius = random.uniform(0.35, 0.5)
    ends = [scale_and_shift(ball(), radius, (0, 0, end)) for end in (-1, 1)]
    return {"ball": surfaces.join_meshes(ends), "rod": scale_and_shift(rod(), (0.15, 0.15, 1 - radius))}


def _table(random: Random) -> Parts:
    width, length = random.uniform(0.15, 0.22), random.uniform(0.5, 0.8)
    legs = [
        scale_and_shift(rod(), (width / 2, width / 2, length / 2), (x, y, -length / 2))
        for x in (-0.8, 0.8)
        for y in (-0.8, 0.8)
    ]
    return {"block": scale_and_shift(block(), (1, 1, 0.12), (0, 0, 0.1)), "rod": surfaces.join_meshes(legs)}


def _tree(random: Random) -> Parts:
    width = random.uniform(0.2, 0.3)
    return {
        "cone": scale_and_shift(cone(), (0.75, 0.75, 0.7), (0, 0, 0.5)),
        "rod": scale_and_shift(rod(), (width, width, 0.45), (0, 0, -0.65)),
    }


def _planet(random: Random) -> Parts:
    return {"ball": scale_and_shift(ball(), random.uniform(0.5, 0.65)), "ring": ring(0.1)}


SHAPES: dict[str, Callable[[Random], Parts]] = {
    "sphere": lambda random: {"ball": ball()},
    "torus": lambda random: {"ring": ring(random.uniform(0.25, 0.45))},
    "cylinder": lambda random: {"rod": scale_and_shift(rod(), (0.7, 0.7, random.uniform(0.7, 1.1)))},
    "cone": lambda random: {"cone": cone()},
    "box": lambda random: {"block": scale_and_shift(block(), (1, 1, random.uniform(0.6, 1.0)))},
    "helix": lambda random: {
        "spring": spring(random.uniform(2, 3), random.uniform(1.6, 2.4), random.uniform(0.15, 0.22))
    },
    "dumbbell": _dumbbell,
    "table": _table,
    "tree": _tree,
    "planet": _planet,
}
"""Generator of each class. It returns surfaces by part, near the origin, not much larger than the unit sphere."""


class Shapes:
    """Generated shapes; classes follow each other cyclically.

    Parameters
    ----------
    count : int
        Number of shapes.
    points : int
        Points of each shape.
    seed, group : int
        A shape depends on seed, group and index alone, so groups have no shape in common.
    """

    class_names = tuple(SHAPES)
    part_names = PART_NAMES

    def __init__(self, count: int, points: int, *, seed: int = 0, group: int = 0) -> None:
        self.points, self._seed, self._group = points, seed, group
        self.labels = np.arange(count) % len(SHAPES)

    def __getitem__(self, index: int) -> Cloud:
        """Return the cloud of shape ``index``."""
        random = np.random.default_rng((self._seed, self._group, index))
        label = int(self.labels[index])
        points, part = sample_points(SHAPES[self.class_names[label]](random), self.points, random)
        return Cloud(points.astype(np.float32), label, part)


def sample_points(parts: Parts, count: int, random: Random) -> tuple[Array, NDArray[np.int64]]:
    """Return points of a shape in a random pose, with hidden points, noise and clutter.

    Parameters
    ----------
    parts : dict of str to TriangleMesh
        Surfaces by name of the part.
    count : int
        Number of points, P.
    random : numpy.random.Generator
        Source of random numbers.

    Returns
    -------
    points : ndarray of float64, shape (P, 3)
        The points.
    part : ndarray of int64, shape (P,)
        Index of each point's part in ``PART_NAMES``.
    """
    mesh = surfaces.join_meshes(list(parts.values()))
    part_of_triangle = np.repeat([PART_NAMES.index(name) for name in parts], [len(m.triangles) for m in parts.values()])
    mesh = TriangleMesh(_posed(mesh.vertices, random), mesh.triangles)
    strewn = round(count * random.uniform(0, CLUTTER))
    visible = count - strewn
    # More points than are visible: those farthest along a random direction are hidden.
    chosen = random_triangles(mesh, round(visible / (1 - random.uniform(0, HIDDEN))), random)
    points = points_in_triangles(mesh, chosen, random)
    seen = np.argsort(points @ _rotation(random)[0])[:visible]
    points, part = points[seen], part_of_triangle[chosen[seen]]
    radius = np.abs(points).max()
    clutter = random.uniform(-radius, radius, (strewn, 3))
    points = np.concatenate([points + random.normal(0, BLUR * radius, points.shape), clutter])
    return points, np.concatenate([part, np.zeros(strewn, np.int64)])


def _posed(vertices: Array, random: Random) -> Array:
    """Return vertices warped by a wave, stretched along each dimension and rotated."""
    towards, along = _rotation(random)[:2]
    wave = np.sin(random.uniform(1, 3) * vertices @ along + random.uniform(0, 2 * np.pi))
    warped = vertices + random.uniform(0, WARP) * wave[:, None] * towards
    stretch = STRETCH ** random.uniform(-1, 1, 3)
    return np.asarray((warped * stretch) @ _rotation(random).T)


def _rotation(random: Random) -> Array:
    """Return a uniformly distributed rotation (3, 3): the orthogonalized axes of three random directions."""
    q, r = np.linalg.qr(random.normal(size=(3, 3)))
    q *= np.sign(np.diag(r))  # otherwise the distribution depends on the signs that the algorithm prefers
    q[:, 0] *= np.linalg.det(q)
    return np.asarray(q)
