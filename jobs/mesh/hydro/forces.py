"""Corner forces: forces of a cell on its four nodes.

Each contribution sums to zero over the four corners of a cell, so momentum is conserved. The work of the forces is
taken from the internal energy of the same cell, so total energy is conserved.

Corner forces have shape (4, H, W). Kernels process one row at a time: a row of corner forces remains in the cache while
all contributions are added to it.
"""

from __future__ import annotations

from math import sqrt

from .jit import Floats, kernel
from .state import Coefficients, Gas, HydroState, Openness
from .viscosity import add_viscosity_row

__all__ = ["corner_forces", "viscous_forces"]


@kernel
def set_pressure_row(state: HydroState, gas: Gas, fx: Floats, fy: Floats, j: int) -> None:
    """Set the corner forces of row ``j`` to the pressure of an ideal gas times dV/dx of the corner.

    Parameters
    ----------
    state : HydroState
    gas : Gas
        Constants of the run.
    fx : numpy.ndarray
        Receives the forces along x (4, H, W).
    fy : numpy.ndarray
        Receives the forces along y (4, H, W).
    j : int
        Row of cells.
    """
    x, y, _, _, energy = state
    mass, gamma = gas.mass, gas.gamma
    k = j + 1
    for i in range(mass.shape[1]):
        m = i + 1
        # Diagonals 0-2 and 1-3. dV/dx of a corner is half the diagonal between its neighbours, turned.
        ax, ay = x[k, m] - x[j, i], y[k, m] - y[j, i]
        bx, by = x[k, i] - x[j, m], y[k, i] - y[j, m]
        volume = 0.5 * (ax * by - bx * ay)
        half_pressure = 0.5 * (gamma[j, i] - 1.0) * mass[j, i] * energy[j, i] / volume
        fx[0, j, i] = -half_pressure * by
        fx[1, j, i] = half_pressure * ay
        fx[2, j, i] = half_pressure * by
        fx[3, j, i] = -half_pressure * ay
        fy[0, j, i] = half_pressure * bx
        fy[1, j, i] = -half_pressure * ax
        fy[2, j, i] = -half_pressure * bx
        fy[3, j, i] = half_pressure * ax


@kernel
def add_hourglass_row(state: HydroState, gas: Gas, damping: float, fx: Floats, fy: Floats, j: int) -> None:
    """Add the forces that damp the hourglass velocity of each cell in row ``j``.

    The force is -damping rho c sqrt(V) g (g . u) / (g . g). Here g is the hourglass pattern (1, -1, 1, -1) of the four
    corners, made orthogonal to linear fields. The division by g . g bounds the force in cells of any shape.

    Source: Flanagan, Belytschko, Int. J. Numer. Meth. Eng. 17 (1981), viscous form.

    Parameters
    ----------
    state : HydroState
    gas : Gas
        Constants of the run.
    damping : float
        Dimensionless coefficient.
    fx : numpy.ndarray
        Corner forces along x (4, H, W).
    fy : numpy.ndarray
        Corner forces along y (4, H, W).
    j : int
        Row of cells.
    """
    x, y, u, v, energy = state
    mass, gamma = gas.mass, gas.gamma
    k = j + 1
    for i in range(mass.shape[1]):
        m = i + 1
        ax, ay = x[k, m] - x[j, i], y[k, m] - y[j, i]
        bx, by = x[k, i] - x[j, m], y[k, i] - y[j, m]
        volume = 0.5 * (ax * by - bx * ay)
        hx = (x[j, i] - x[j, m] + x[k, m] - x[k, i]) * 0.5 / volume
        hy = (y[j, i] - y[j, m] + y[k, m] - y[k, i]) * 0.5 / volume
        # Opposite corners have opposite gradients: along the diagonals g is (1 + s, -1 + t, 1 - s, -1 - t).
        s = hx * by - hy * bx
        t = hy * ax - hx * ay
        g0, g1, g2, g3 = 1.0 + s, -1.0 + t, 1.0 - s, -1.0 - t
        sound = sqrt(gamma[j, i] * (gamma[j, i] - 1.0) * max(energy[j, i], 0.0))
        strength = damping * mass[j, i] / sqrt(volume) * sound / (g0 * g0 + g1 * g1 + g2 * g2 + g3 * g3)
        qx = -strength * (g0 * u[j, i] + g1 * u[j, m] + g2 * u[k, m] + g3 * u[k, i])
        qy = -strength * (g0 * v[j, i] + g1 * v[j, m] + g2 * v[k, m] + g3 * v[k, i])
        fx[0, j, i] += g0 * qx
        fx[1, j, i] += g1 * qx
        fx[2, j, i] += g2 * qx
        fx[3, j, i] += g3 * qx
        fy[0, j, i] += g0 * qy
        fy[1, j, i] += g1 * qy
        fy[2, j, i] += g2 * qy
        fy[3, j, i] += g3 * qy


@kernel
def add_subzone_row(state: HydroState, gas: Gas, merit: float, fx: Floats, fy: Floats, j: int) -> None:
    """Add the forces of the subzonal pressures of row ``j``, weighted by ``merit``.

    A subzone keeps its ``fraction`` (4, H, W) of the cell's mass. Its pressure differs from the cell's by rho c^2
    (1 - V_corner / (fraction V)). The difference is linear in the volume, so it remains bounded when a corner inverts.
    A density would not.

    Source: Caramana, Shashkov, J. Comput. Phys. 142 (1998).

    Parameters
    ----------
    state : HydroState
    gas : Gas
        Constants of the run.
    merit : float
        Dimensionless coefficient.
    fx : numpy.ndarray
        Corner forces along x (4, H, W).
    fy : numpy.ndarray
        Corner forces along y (4, H, W).
    j : int
        Row of cells.
    """
    x, y, _, _, energy = state
    mass, gamma, fraction = gas.mass, gas.gamma, gas.fraction
    k = j + 1
    for i in range(mass.shape[1]):
        m = i + 1
        x0, x1, x2, x3 = x[j, i], x[j, m], x[k, m], x[k, i]
        y0, y1, y2, y3 = y[j, i], y[j, m], y[k, m], y[k, i]
        volume = 0.5 * ((x2 - x0) * (y3 - y1) - (x3 - x1) * (y2 - y0))
        stiffness = merit * gamma[j, i] * (gamma[j, i] - 1.0) * max(energy[j, i], 0.0) * mass[j, i] / volume / 16.0
        sx, sy = x0 + x1 + x2 + x3, y0 + y1 + y2 + y3
        # 16 V_c = d x g with d from the corner to the sum of the others, g from the following corner to the previous
        # one. Opposite subzones have opposite g.
        gx, gy, hx, hy = x3 - x1, y3 - y1, x0 - x2, y0 - y2
        d0x, d0y = sx - 4.0 * x0, sy - 4.0 * y0
        d1x, d1y = sx - 4.0 * x1, sy - 4.0 * y1
        d2x, d2y = sx - 4.0 * x2, sy - 4.0 * y2
        d3x, d3y = sx - 4.0 * x3, sy - 4.0 * y3
        scale = 1.0 / (16.0 * volume)
        p0 = stiffness * (1.0 - scale * (d0x * gy - d0y * gx) / fraction[0, j, i])
        p1 = stiffness * (1.0 - scale * (d1x * hy - d1y * hx) / fraction[1, j, i])
        p2 = stiffness * (1.0 - scale * (d2y * gx - d2x * gy) / fraction[2, j, i])
        p3 = stiffness * (1.0 - scale * (d3y * hx - d3x * hy) / fraction[3, j, i])
        # All corners of a cell share p g; the corner itself has -4 p g more, its two neighbours p d turned.
        ex = gy * (p0 - p2) + hy * (p1 - p3)
        ey = -gx * (p0 - p2) - hx * (p1 - p3)
        fx[0, j, i] += ex - 4.0 * p0 * gy + p3 * d3y - p1 * d1y
        fx[1, j, i] += ex - 4.0 * p1 * hy + p0 * d0y - p2 * d2y
        fx[2, j, i] += ex + 4.0 * p2 * gy + p1 * d1y - p3 * d3y
        fx[3, j, i] += ex + 4.0 * p3 * hy + p2 * d2y - p0 * d0y
        fy[0, j, i] += ey + 4.0 * p0 * gx - p3 * d3x + p1 * d1x
        fy[1, j, i] += ey + 4.0 * p1 * hx - p0 * d0x + p2 * d2x
        fy[2, j, i] += ey - 4.0 * p2 * gx - p1 * d1x + p3 * d3x
        fy[3, j, i] += ey - 4.0 * p3 * hx - p2 * d2x + p0 * d0x


@kernel
def corner_forces(
    state: HydroState, gas: Gas, coefficients: Coefficients, openness: Openness, fx: Floats, fy: Floats
) -> None:
    """Fill ``fx, fy`` with all forces of each cell on its corners.

    Parameters
    ----------
    state : HydroState
        The state.
    gas : Gas
        Constants of the run.
    coefficients : Coefficients
        Coefficients of viscosity, hourglass damping and subzonal pressures.
    openness : Openness
        Limiter, as :func:`.viscosity.edge_openness` fills it for ``state``.
    fx, fy : ndarray, shape (4, H, W)
        Overwritten with the forces along x and y.
    """
    for j in range(gas.mass.shape[0]):
        set_pressure_row(state, gas, fx, fy, j)
        add_viscosity_row(state, gas, coefficients, openness, fx, fy, j)
        add_hourglass_row(state, gas, coefficients.hourglass, fx, fy, j)
        add_subzone_row(state, gas, coefficients.subzone, fx, fy, j)


@kernel
def viscous_forces(
    state: HydroState, gas: Gas, coefficients: Coefficients, openness: Openness, fx: Floats, fy: Floats
) -> None:
    """Fill ``fx, fy`` with the forces of the artificial viscosity alone.

    Parameters
    ----------
    state, gas, coefficients, openness, fx, fy
        As in :func:`corner_forces`.
    """
    for j in range(gas.mass.shape[0]):
        fx[:, j] = 0.0
        fy[:, j] = 0.0
        add_viscosity_row(state, gas, coefficients, openness, fx, fy, j)
