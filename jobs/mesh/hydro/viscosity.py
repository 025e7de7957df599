"""Edge artificial viscosity with a limiter.

Each edge of a cell that shortens across its part of the median mesh pushes its two ends apart; the limiter removes the
force where the velocity varies linearly along a mesh line, so that smooth flow and uniform compression stay free of
it.

Source: Caramana, Shashkov, Whalen, "Formulations of artificial viscosity for multi-dimensional shock wave
computations", J. Comput. Phys. 144 (1998), section 4.
"""

from __future__ import annotations

from math import sqrt

from .jit import Floats, kernel
from .state import Coefficients, Gas, Openness, State

__all__ = ["add_viscosity_row", "edge_openness"]


@kernel
def openness(state: State, j: int, i: int, dj: int, di: int, back: int, front: int) -> float:
    """1 - psi of the edge from node (j, i) to (j+dj, i+di): 0 in linear flow, 1 where the velocity changes abruptly.

    psi compares the velocity gradients along the mesh line before and after the edge with its own. ``back`` and
    ``front`` are 1, or -1 where there is no such neighbour: beyond a wall the flow continues mirrored, which is the
    edge itself with the component along the wall reversed.
    """
    x, y, u, v, _ = state
    dx, dy = x[j + dj, i + di] - x[j, i], y[j + dj, i + di] - y[j, i]
    du, dv = u[j + dj, i + di] - u[j, i], v[j + dj, i + di] - v[j, i]
    a, b, turn_x, turn_y = j - back * dj, i - back * di, 1 - di + di * back, 1 - dj + dj * back
    along = turn_x * (x[j, i] - x[a, b]) * dx + turn_y * (y[j, i] - y[a, b]) * dy
    before = (turn_x * (u[j, i] - u[a, b]) * du + turn_y * (v[j, i] - v[a, b]) * dv) / along
    # A mesh line that folds back has no gradient to compare with.
    before = before if along > 0.0 else 0.0
    c, d, turn_x, turn_y = j + dj + front * dj, i + di + front * di, 1 - di + di * front, 1 - dj + dj * front
    along = turn_x * (x[c, d] - x[j + dj, i + di]) * dx + turn_y * (y[c, d] - y[j + dj, i + di]) * dy
    after = (turn_x * (u[c, d] - u[j + dj, i + di]) * du + turn_y * (v[c, d] - v[j + dj, i + di]) * dv) / along
    after = after if along > 0.0 else 0.0
    smaller = before if before < after else after
    middle = 0.5 * (before + after)
    speed = du * du + dv * dv
    psi = (middle if middle < 2.0 * smaller else 2.0 * smaller) * (dx * dx + dy * dy) / speed
    psi = psi if psi > 0.0 else 0.0
    return 1.0 - psi if psi < 1.0 and speed > 0.0 else 0.0


@kernel
def edge_openness(state: State, result: Openness) -> None:
    """Fill 1 - psi of all edges. The inner loops leave out the ends, so that they contain no branch and use vectors."""
    along_x, along_y = result
    height, width = along_y.shape[0], along_x.shape[1]
    for j in range(height + 1):
        for i in range(1, width - 1):
            along_x[j, i] = openness(state, j, i, 0, 1, 1, 1)
        along_x[j, 0] = openness(state, j, 0, 0, 1, -1, 1 if width > 1 else -1)
        along_x[j, width - 1] = openness(state, j, width - 1, 0, 1, 1 if width > 1 else -1, -1)
    for j in range(height):
        back, front = 1 if j > 0 else -1, 1 if j < height - 1 else -1
        for i in range(width + 1):
            along_y[j, i] = openness(state, j, i, 1, 0, back, front)


@kernel
def edge_force(
    du: float, dv: float, sx: float, sy: float, weight: float, sound: float, quadratic: float
) -> tuple[float, float]:
    """Viscous force on the far end of an edge; the near end gets its opposite.

    ``du, dv`` is the velocity of the far end relative to the near one, ``sx, sy`` the median-mesh vector of the edge
    in this cell, ``weight`` density times openness, ``sound`` the linear and ``quadratic`` the quadratic coefficient
    times sound speed and (gamma+1)/4. Kuropatenko's combination of both makes the pressure jump of a strong shock
    exact.
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
    state: State, gas: Gas, coefficients: Coefficients, openness: Openness, fx: Floats, fy: Floats, j: int
) -> None:
    """Add the viscous forces of row ``j`` of cells to the corner forces ``fx, fy`` (4, W)."""
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
        fx[0, i] += fx3 - fx0
        fx[1, i] += fx0 - fx1
        fx[2, i] += fx1 - fx2
        fx[3, i] += fx2 - fx3
        fy[0, i] += fy3 - fy0
        fy[1, i] += fy0 - fy1
        fy[2, i] += fy1 - fy2
        fy[3, i] += fy2 - fy3
