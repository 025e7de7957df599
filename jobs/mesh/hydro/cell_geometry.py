"""Geometry of quadrilateral cells: areas, corner volumes and scaled corner Jacobians.

Nodes ``x, y`` have shape (H+1, W+1), cells (H, W), and corners (4, H, W) in the order of the package's diagram.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import numpy.typing as npt

from .jit import Floats, kernel

__all__ = ["areas", "corner_volumes", "extreme_jacobians", "lower_to_minimum_jacobian", "quad_area", "sine"]


@kernel
def quad_area(x0: float, y0: float, x1: float, y1: float, x2: float, y2: float, x3: float, y3: float) -> float:
    """Return the signed area of the quadrilateral 0-1-2-3, positive if it is counter-clockwise.

    Parameters
    ----------
    x0, y0, x1, y1, x2, y2, x3, y3
        Coordinates of the corners.

    Returns
    -------
    float
    """
    return 0.5 * ((x2 - x0) * (y3 - y1) - (x3 - x1) * (y2 - y0))


@kernel
def areas(x: Floats, y: Floats) -> Floats:
    """Return the signed area of each cell (H, W).

    Parameters
    ----------
    x, y
        Coordinates of the nodes (H+1, W+1).

    Returns
    -------
    numpy.ndarray
    """
    height, width = x.shape[0] - 1, x.shape[1] - 1
    area = np.empty((height, width))
    for j in range(height):
        k = j + 1
        for i in range(width):
            m = i + 1
            area[j, i] = quad_area(x[j, i], y[j, i], x[j, m], y[j, m], x[k, m], y[k, m], x[k, i], y[k, i])
    return area


@kernel
def corner_volumes(x: Floats, y: Floats) -> Floats:
    """Return the area of each subzone (4, H, W): from a corner to the middles of its edges and the center.

    Parameters
    ----------
    x, y
        Coordinates of the nodes (H+1, W+1).

    Returns
    -------
    numpy.ndarray
    """
    height, width = x.shape[0] - 1, x.shape[1] - 1
    volume = np.empty((4, height, width))
    px, py = np.empty(4), np.empty(4)
    for j in range(height):
        for i in range(width):
            px[0], px[1], px[2], px[3] = x[j, i], x[j, i + 1], x[j + 1, i + 1], x[j + 1, i]
            py[0], py[1], py[2], py[3] = y[j, i], y[j, i + 1], y[j + 1, i + 1], y[j + 1, i]
            for c in range(4):
                # 16 V_c = d x g: d points from the corner to the sum of the others, g from the following corner to the
                # previous one.
                following, opposite, previous = (c + 1) % 4, (c + 2) % 4, (c + 3) % 4
                dx = px[following] + px[opposite] + px[previous] - 3.0 * px[c]
                dy = py[following] + py[opposite] + py[previous] - 3.0 * py[c]
                volume[c, j, i] = (dx * (py[previous] - py[following]) - dy * (px[previous] - px[following])) / 16.0
    return volume


@kernel
def sine(ax: float, ay: float, bx: float, by: float) -> float:
    """Return the scaled corner Jacobian: the sine from edge a to edge b. It is -1 if an edge has length 0.

    Parameters
    ----------
    ax, ay, bx, by
        Components of the edges.

    Returns
    -------
    float
    """
    lengths = (ax * ax + ay * ay) * (bx * bx + by * by)
    return -1.0 if lengths <= 0.0 else (ax * by - ay * bx) / sqrt(lengths)


@kernel
def cell_sines(
    x0: float, y0: float, x1: float, y1: float, x2: float, y2: float, x3: float, y3: float
) -> tuple[float, float, float, float]:
    """Return the scaled Jacobians of the four corners of a cell.

    Parameters
    ----------
    x0, y0, x1, y1, x2, y2, x3, y3
        Coordinates of the corners, counter-clockwise.

    Returns
    -------
    (float, float, float, float)
    """
    ax, ay, bx, by = x1 - x0, y1 - y0, x2 - x1, y2 - y1
    cx, cy, dx, dy = x3 - x2, y3 - y2, x0 - x3, y0 - y3
    return sine(dx, dy, ax, ay), sine(ax, ay, bx, by), sine(bx, by, cx, cy), sine(cx, cy, dx, dy)


@kernel
def extreme_jacobians(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the smallest and the largest scaled corner Jacobian of each cell, both (H, W).

    Parameters
    ----------
    x, y
        Coordinates of the nodes (H+1, W+1).

    Returns
    -------
    (numpy.ndarray, numpy.ndarray)
    """
    height, width = x.shape[0] - 1, x.shape[1] - 1
    smallest, largest = np.empty((height, width)), np.empty((height, width))
    for j in range(height):
        k = j + 1
        for i in range(width):
            m = i + 1
            s0, s1, s2, s3 = cell_sines(x[j, i], y[j, i], x[j, m], y[j, m], x[k, m], y[k, m], x[k, i], y[k, i])
            smallest[j, i] = min(min(s0, s1), min(s2, s3))
            largest[j, i] = max(max(s0, s1), max(s2, s3))
    return smallest, largest


@kernel
def lower_to_minimum_jacobian(x: Floats, y: Floats, record: npt.NDArray[np.float32]) -> None:
    """Set ``record`` (H, W) to its minimum with the smallest scaled corner Jacobian of each cell.

    Parameters
    ----------
    x : numpy.ndarray
        Coordinates of the nodes (H+1, W+1).
    y : numpy.ndarray
        Coordinates of the nodes (H+1, W+1).
    record : numpy.ndarray
        Smallest Jacobians so far.
    """
    height, width = record.shape
    for j in range(height):
        k = j + 1
        for i in range(width):
            m = i + 1
            s0, s1, s2, s3 = cell_sines(x[j, i], y[j, i], x[j, m], y[j, m], x[k, m], y[k, m], x[k, i], y[k, i])
            record[j, i] = min(record[j, i], np.float32(min(min(s0, s1), min(s2, s3))))
