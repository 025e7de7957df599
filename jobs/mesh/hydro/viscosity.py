"""Edge artificial viscosity with a limiter.

Each edge of a cell whose ends approach each other across its segment of the median mesh pushes them apart. The limiter
removes the force where the velocity is linear along a mesh line. Smooth flow and uniform compression therefore have no
viscosity.

Source: Caramana, Shashkov, Whalen, "Formulations of artificial viscosity for multi-dimensional shock wave
computations", J. Comput. Phys. 144 (1998), section 4.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from .jit import Floats, kernel
from .state import Coefficients, Gas, HydroState, Openness

__all__ = ["add_viscosity_row", "edge_openness"]

Edge = tuple[float, float, float, float]
"""Differences of x, y, u and v from the first node of an edge to the second."""

Edges = tuple[Floats, Floats, Floats, Floats]
"""Differences of several edges, in the order of ``Edge``."""


@kernel
def openness(before: Edge, edge: Edge, after: Edge) -> float:
    """Return 1 - psi of an edge: 0 in linear flow, 1 where the velocity changes abruptly.

    The limiter psi, from 0 to 1, compares the velocity gradients of the previous and the next edge on the mesh line
    with the edge's own.

    Parameters
    ----------
    before : tuple
        Previous edge on the mesh line.
    edge : tuple
    after : tuple
        Next edge on the mesh line.

    Returns
    -------
    float
    """
    dx, dy, du, dv = edge
    along = before[0] * dx + before[1] * dy
    # Divided before the tests, which then only select, so that the loop is vectorized. IEEE division by 0 is harmless.
    slope_before = (before[2] * du + before[3] * dv) / along
    # If the mesh line folds back, the neighboring edge has no gradient to compare with.
    slope_before = slope_before if along > 0.0 else 0.0
    along = after[0] * dx + after[1] * dy
    slope_after = (after[2] * du + after[3] * dv) / along
    slope_after = slope_after if along > 0.0 else 0.0
    smaller = slope_before if slope_before < slope_after else slope_after
    middle = 0.5 * (slope_before + slope_after)
    speed = du * du + dv * dv
    psi = (middle if middle < 2.0 * smaller else 2.0 * smaller) * (dx * dx + dy * dy) / speed
    psi = psi if psi > 0.0 else 0.0  # without a velocity difference psi is NaN, and the result 0
    return 1.0 - psi if psi < 1.0 and speed > 0.0 else 0.0


@kernel
def set_openness(before: Edges, edge: Edges, after: Edges, result: Floats) -> None:
    """Set ``result`` to 1 - psi of a row of edges.

    Parameters
    ----------
    before : tuple
        Previous edges on their mesh lines.
    edge : tuple
    after : tuple
        Next edges on their mesh lines.
    result : numpy.ndarray
    """
    bx, by, bu, bv = before
    x, y, u, v = edge
    ax, ay, au, av = after
    for i in range(result.shape[0]):
        result[i] = openness((bx[i], by[i], bu[i], bv[i]), (x[i], y[i], u[i], v[i]), (ax[i], ay[i], au[i], av[i]))


@kernel
def edge_row(edges: Floats, j: int, first: int, count: int) -> Edges:
    """Return ``count`` edges of row ``j`` of an array (4, rows, columns), from column ``first`` on.

    Parameters
    ----------
    edges : numpy.ndarray
    j : int
        Row.
    first : int
        First column.
    count : int
        Number of edges.

    Returns
    -------
    tuple
    """
    last = first + count
    return edges[0, j, first:last], edges[1, j, first:last], edges[2, j, first:last], edges[3, j, first:last]


@kernel
def set_differences(values: Floats, across: Floats, up: Floats, sign: float) -> None:
    """Set ``across`` and ``up`` to the differences of ``values`` along the edges in the two directions.

    The first and the last edge of a mesh line lie beyond a wall, where the flow is mirrored. They are their neighbors
    with the component along the wall reversed.

    Parameters
    ----------
    values : ndarray, shape (H+1, W+1)
        Values of nodes.
    across : ndarray, shape (H+1, W+2)
        Overwritten with the differences along x.
    up : ndarray, shape (H+2, W+1)
        Overwritten with the differences along y.
    sign : float
        1 for components along x, -1 for components along y.
    """
    lines, columns = values.shape
    for j in range(lines):
        for i in range(columns - 1):
            across[j, i + 1] = values[j, i + 1] - values[j, i]
        across[j, 0], across[j, columns] = sign * across[j, 1], sign * across[j, columns - 1]
    for j in range(lines - 1):
        for i in range(columns):
            up[j + 1, i] = values[j + 1, i] - values[j, i]
    for i in range(columns):
        up[0, i], up[lines, i] = -sign * up[1, i], -sign * up[lines - 1, i]


@kernel
def edge_openness(state: HydroState, result: Openness) -> None:
    """Fill ``result`` with 1 - psi of all edges of ``state``.

    Parameters
    ----------
    state : HydroState
    result : Openness
    """
    along_x, along_y = result
    height, width = state.energy.shape
    across, up = np.empty((4, height + 1, width + 2)), np.empty((4, height + 2, width + 1))
    for part in range(4):
        set_differences(state[part], across[part], up[part], 1.0 if part % 2 == 0 else -1.0)
    for j in range(height + 1):
        before, edge, after = (
            edge_row(across, j, 0, width),
            edge_row(across, j, 1, width),
            edge_row(across, j, 2, width),
        )
        set_openness(before, edge, after, along_x[j])
    for j in range(height):
        before, edge, after = (
            edge_row(up, j, 0, width + 1),
            edge_row(up, j + 1, 0, width + 1),
            edge_row(up, j + 2, 0, width + 1),
        )
        set_openness(before, edge, after, along_y[j])


@kernel
def edge_force(
    du: float, dv: float, sx: float, sy: float, weight: float, sound: float, quadratic: float
) -> tuple[float, float]:
    """Return the viscous force on the far end of an edge; the force on the near end is its opposite.

    Parameters
    ----------
    du, dv : float
        Velocity of the far end relative to the near end.
    sx, sy : float
        Normal of the segment from the middle of the edge to the center of the cell. It has the segment's length and
        points from the near end to the far end.
    weight : float
        Density times openness.
    sound : float
        Linear coefficient times sound speed.
    quadratic : float
        Quadratic coefficient times (gamma + 1) / 4.

    Returns
    -------
    (float, float)
        Force along x and y.

    Notes
    -----
    Kuropatenko's combination of both terms makes the pressure jump of a strong shock exact.
    """
    closing = du * sx + dv * sy
    if closing >= 0.0:
        return 0.0, 0.0
    speed = sqrt(du * du + dv * dv)
    q = quadratic * speed
    strength = weight * (q + sqrt(q * q + sound * sound)) * closing / speed
    return strength * du, strength * dv


@kernel
def add_viscosity_row(
    state: HydroState, gas: Gas, coefficients: Coefficients, openness: Openness, fx: Floats, fy: Floats, j: int
) -> None:
    """Add the viscous forces of row ``j`` of cells to the corner forces.

    Parameters
    ----------
    state, gas, coefficients, openness, fx, fy
        As in :func:`.forces.corner_forces`, but ``fx`` and ``fy`` are added to.
    j : int
        The row.
    """
    x, y, u, v, energy = state
    mass, gamma = gas.mass, gas.gamma
    linear, quadratic = coefficients.linear, coefficients.quadratic
    along_x, along_y = openness
    k = j + 1
    for i in range(mass.shape[1]):
        m = i + 1
        x0, x1, x2, x3 = x[j, i], x[j, m], x[k, m], x[k, i]
        y0, y1, y2, y3 = y[j, i], y[j, m], y[k, m], y[k, i]
        u0, u1, u2, u3 = u[j, i], u[j, m], u[k, m], u[k, i]
        v0, v1, v2, v3 = v[j, i], v[j, m], v[k, m], v[k, i]
        volume = 0.5 * ((x2 - x0) * (y3 - y1) - (x3 - x1) * (y2 - y0))
        density = mass[j, i] / volume
        sound = linear * sqrt(gamma[j, i] * (gamma[j, i] - 1.0) * max(energy[j, i], 0.0))
        steep = quadratic * 0.25 * (gamma[j, i] + 1.0)
        # From the middle of edge 0 to the centre of the cell, and likewise for edge 1; edges 2 and 3 have the opposite.
        ax, ay = 0.25 * (x2 + x3 - x0 - x1), 0.25 * (y2 + y3 - y0 - y1)
        bx, by = 0.25 * (x3 + x0 - x1 - x2), 0.25 * (y3 + y0 - y1 - y2)
        fx0, fy0 = edge_force(u1 - u0, v1 - v0, ay, -ax, density * along_x[j, i], sound, steep)
        fx1, fy1 = edge_force(u2 - u1, v2 - v1, by, -bx, density * along_y[j, m], sound, steep)
        fx2, fy2 = edge_force(u3 - u2, v3 - v2, -ay, ax, density * along_x[k, i], sound, steep)
        fx3, fy3 = edge_force(u0 - u3, v0 - v3, -by, bx, density * along_y[j, i], sound, steep)
        fx[0, j, i] += fx3 - fx0
        fx[1, j, i] += fx0 - fx1
        fx[2, j, i] += fx1 - fx2
        fx[3, j, i] += fx2 - fx3
        fy[0, j, i] += fy3 - fy0
        fy[1, j, i] += fy0 - fy1
        fy[2, j, i] += fy1 - fy2
        fy[3, j, i] += fy2 - fy3
