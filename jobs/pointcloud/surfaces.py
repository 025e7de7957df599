"""Surfaces as triangle meshes, from which shapes are composed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .off import TriangleMesh

AROUND = 24
"""Number of segments of a full circle."""

Array = NDArray[np.float64]


def sheet(grid: Array) -> TriangleMesh:
    """Return the surface through a grid of points (U, V, 3): two triangles for each grid cell."""
    rows, columns = grid.shape[:2]
    index = np.arange(rows * columns).reshape(rows, columns)
    a, b, c, d = (corner.ravel() for corner in (index[:-1, :-1], index[1:, :-1], index[1:, 1:], index[:-1, 1:]))
    return TriangleMesh(grid.reshape(-1, 3), np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)]))


def join_meshes(meshes: Sequence[TriangleMesh]) -> TriangleMesh:
    """Return a mesh with the vertices and triangles of all meshes."""
    starts = np.cumsum([0, *(len(mesh.vertices) for mesh in meshes)])
    triangles = [mesh.triangles + start for mesh, start in zip(meshes, starts[:-1], strict=True)]
    return TriangleMesh(np.concatenate([mesh.vertices for mesh in meshes]), np.concatenate(triangles))


def scale_and_shift(
    mesh: TriangleMesh, scale: float | Sequence[float] = 1.0, shift: Sequence[float] = (0, 0, 0)
) -> TriangleMesh:
    """Return a mesh scaled along each dimension, then shifted.

    Parameters
    ----------
    mesh : TriangleMesh
        The mesh.
    scale : float or sequence of float
        Factor, one for all dimensions or one for each.
    shift : sequence of float
        Translation, three values.

    Returns
    -------
    TriangleMesh
        The new mesh.
    """
    return TriangleMesh(mesh.vertices * np.asarray(scale) + np.asarray(shift), mesh.triangles)


def surface_of_revolution(profile: Array) -> TriangleMesh:
    """Return the surface that a polyline (P, 2) of radius and height sweeps around the z axis."""
    angle = np.linspace(0, 2 * np.pi, AROUND + 1)
    radius, height = profile.T[:, :, None]
    return sheet(np.stack(np.broadcast_arrays(radius * np.cos(angle), radius * np.sin(angle), height), 2))


def ball() -> TriangleMesh:
    """Return the unit sphere."""
    angle = np.linspace(0, np.pi, AROUND // 2 + 1)
    return surface_of_revolution(np.stack([np.sin(angle), np.cos(angle)], 1))


def ring(thickness: float) -> TriangleMesh:
    """Return a torus around the z axis of radius 1 with a tube of radius ``thickness``."""
    angle = np.linspace(0, 2 * np.pi, AROUND // 2 + 1)
    return surface_of_revolution(np.stack([1 + thickness * np.cos(angle), thickness * np.sin(angle)], 1))


def rod() -> TriangleMesh:
    """Return a closed cylinder of radius 1, from height -1 to 1."""
    side = [(1.0, height) for height in np.linspace(-1, 1, 9)]
    return surface_of_revolution(np.array([(0.0, -1.0), (0.5, -1.0), *side, (0.5, 1.0), (0.0, 1.0)]))


def cone() -> TriangleMesh:
    """Return a cone with its base: radius 1 at height -1, tip at height 1."""
    side = [((1 - height) / 2, height) for height in np.linspace(-1, 1, 9)]
    return surface_of_revolution(np.array([(0.0, -1.0), (0.5, -1.0), *side]))


def block() -> TriangleMesh:
    """Return the surface of the cube from -1 to 1."""
    along = np.linspace(-1, 1, 7)
    u, v = np.meshgrid(along, along, indexing="ij")
    sides = [np.roll(np.stack([u, v, np.full_like(u, end)], 2), turn, axis=2) for turn in range(3) for end in (-1, 1)]
    return join_meshes([sheet(side) for side in sides])


def spring(turns: float, rise: float, thickness: float) -> TriangleMesh:
    """Return a tube along a helix of radius 1.

    Parameters
    ----------
    turns : float
        Number of turns of the helix.
    rise : float
        Height of the full helix.
    thickness : float
        Radius of the tube.

    Returns
    -------
    TriangleMesh
        The tube, without end caps.
    """
    angle = np.linspace(0, 2 * np.pi * turns, round(turns * AROUND) + 1)[:, None]
    slope = rise / (2 * np.pi * turns)
    zero = np.zeros_like(angle)
    centre = np.stack([np.cos(angle), np.sin(angle), slope * angle - rise / 2], 2)
    outward = np.stack([np.cos(angle), np.sin(angle), zero], 2)
    across = np.stack([-slope * np.sin(angle), slope * np.cos(angle), zero - 1], 2) / np.hypot(1, slope)
    around = np.linspace(0, 2 * np.pi, AROUND // 2 + 1)[None, :, None]
    return sheet(centre + thickness * (np.cos(around) * outward + np.sin(around) * across))
