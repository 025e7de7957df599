"""The surfaces that shapes are made of, as triangle meshes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .off import TriangleMesh

AROUND = 24
"""Corners of what is round."""

Array = NDArray[np.float64]


def sheet(grid: Array) -> TriangleMesh:
    """The surface through a grid of points (U, V, 3): two triangles for each of its cells."""
    rows, columns = grid.shape[:2]
    index = np.arange(rows * columns).reshape(rows, columns)
    a, b, c, d = (corner.ravel() for corner in (index[:-1, :-1], index[1:, :-1], index[1:, 1:], index[:-1, 1:]))
    return TriangleMesh(grid.reshape(-1, 3), np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)]))


def joined(meshes: Sequence[TriangleMesh]) -> TriangleMesh:
    """All of them as one."""
    starts = np.cumsum([0, *(len(mesh.vertices) for mesh in meshes)])
    triangles = [mesh.triangles + start for mesh, start in zip(meshes, starts[:-1], strict=True)]
    return TriangleMesh(np.concatenate([mesh.vertices for mesh in meshes]), np.concatenate(triangles))


def moved(mesh: TriangleMesh, scale: float | Sequence[float] = 1.0, shift: Sequence[float] = (0, 0, 0)) -> TriangleMesh:
    """``mesh`` scaled along each dimension, then shifted."""
    return TriangleMesh(mesh.vertices * np.asarray(scale) + np.asarray(shift), mesh.triangles)


def revolved(profile: Array) -> TriangleMesh:
    """What a polyline of (radius, height) sweeps about the z axis."""
    angle = np.linspace(0, 2 * np.pi, AROUND + 1)
    radius, height = profile.T[:, :, None]
    return sheet(np.stack(np.broadcast_arrays(radius * np.cos(angle), radius * np.sin(angle), height), 2))


def ball() -> TriangleMesh:
    """The unit sphere."""
    angle = np.linspace(0, np.pi, AROUND // 2 + 1)
    return revolved(np.stack([np.sin(angle), np.cos(angle)], 1))


def ring(thickness: float) -> TriangleMesh:
    """A torus about the z axis of radius 1, with a tube of this radius."""
    angle = np.linspace(0, 2 * np.pi, AROUND // 2 + 1)
    return revolved(np.stack([1 + thickness * np.cos(angle), thickness * np.sin(angle)], 1))


def rod() -> TriangleMesh:
    """A cylinder with its two ends: radius 1, heights -1 to 1."""
    side = [(1.0, height) for height in np.linspace(-1, 1, 9)]
    return revolved(np.array([(0.0, -1.0), (0.5, -1.0), *side, (0.5, 1.0), (0.0, 1.0)]))


def cone() -> TriangleMesh:
    """A cone with its base: radius 1 at height -1, its tip at height 1."""
    side = [((1 - height) / 2, height) for height in np.linspace(-1, 1, 9)]
    return revolved(np.array([(0.0, -1.0), (0.5, -1.0), *side]))


def block() -> TriangleMesh:
    """The surface of the cube from -1 to 1."""
    along = np.linspace(-1, 1, 7)
    u, v = np.meshgrid(along, along, indexing="ij")
    sides = [np.roll(np.stack([u, v, np.full_like(u, end)], 2), turn, axis=2) for turn in range(3) for end in (-1, 1)]
    return joined([sheet(side) for side in sides])


def spring(turns: float, rise: float, thickness: float) -> TriangleMesh:
    """A tube of radius ``thickness`` along a helix of radius 1 that rises by ``rise`` in all."""
    angle = np.linspace(0, 2 * np.pi * turns, round(turns * AROUND) + 1)[:, None]
    slope = rise / (2 * np.pi * turns)
    zero = np.zeros_like(angle)
    centre = np.stack([np.cos(angle), np.sin(angle), slope * angle - rise / 2], 2)
    outward = np.stack([np.cos(angle), np.sin(angle), zero], 2)
    across = np.stack([-slope * np.sin(angle), slope * np.cos(angle), zero - 1], 2) / np.hypot(1, slope)
    around = np.linspace(0, 2 * np.pi, AROUND // 2 + 1)[None, :, None]
    return sheet(centre + thickness * (np.cos(around) * outward + np.sin(around) * across))
