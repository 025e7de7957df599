"""The 18 channels of a sample, computed from the state of a run.

All are cell values (H, W). ``du/dx`` is the mean over the cell: the sum of dV/dx times u over its four corners, divided
by the area V. Here dV/dx is the derivative of V with respect to the x coordinate of the corner.

==  ======================  ====================================================================
 0  log density             natural logarithm of mass / area
 1  log pressure            of (gamma - 1) density energy
 2  specific energy         internal energy per mass
 3  sound speed             sqrt(gamma pressure / density)
 4  gamma                   ratio of specific heats
 5  velocity u              along x; mean of the four nodes
 6  velocity v              along y; mean of the four nodes
 7  divergence              du/dx + dv/dy
 8  vorticity               dv/dx - du/dy
 9  strain rate             sqrt((du/dx - dv/dy)^2 + (dv/dx + du/dy)^2)
10  viscous heating         log(1 + power of the artificial viscosity per area)
11  log V/V0                of the area over the initial area
12  minimum Jacobian        smallest sine of the four corner angles; 1 in a rectangle, <= 0 inverted
13  maximum Jacobian        largest sine of the four corner angles
14  log aspect ratio        of the lengths of the midlines: the one along i over the one along j
15  log edge ratio          of the longest edge over the shortest
16  skew                    cosine of the angle between the midlines, with its sign
17  taper                   distance between the middles of the diagonals, doubled, over the shorter midline
==  ======================  ====================================================================
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from distconv.jobs.mesh.hydro.advance import internal_work
from distconv.jobs.mesh.hydro.cell_geometry import extreme_jacobians, lower_to_minimum_jacobian
from distconv.jobs.mesh.hydro.forces import viscous_forces
from distconv.jobs.mesh.hydro.jit import Floats
from distconv.jobs.mesh.hydro.state import Coefficients, Gas, HydroState, Openness
from distconv.jobs.mesh.hydro.viscosity import edge_openness

__all__ = ["extrapolated_jacobian", "sample_channels"]

Singles = npt.NDArray[np.float32]


def corners(nodes: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the values at the four corners of each cell (H, W), counter-clockwise."""
    return nodes[:-1, :-1], nodes[:-1, 1:], nodes[1:, 1:], nodes[1:, :-1]


def sample_channels(state: HydroState, gas: Gas, coefficients: Coefficients) -> Singles:
    """Return the channels of a state.

    Parameters
    ----------
    state : HydroState
        The state.
    gas : Gas
        Constants of the run.
    coefficients : Coefficients
        Coefficients of the artificial viscosity, for channel 10.

    Returns
    -------
    ndarray of float32, shape (18, H, W)
        The channels.
    """
    x, y, u, v = (corners(nodes) for nodes in state[:4])
    result = np.empty((18, *gas.mass.shape), np.float32)
    # Diagonals; their cross product is twice the area, and turned by a right angle they are twice dV/dx of the corners.
    ax, ay, bx, by = x[2] - x[0], y[2] - y[0], x[3] - x[1], y[3] - y[1]
    volume = 0.5 * (ax * by - bx * ay)
    fill_thermodynamics(result, state.energy, gas, volume)
    result[5], result[6] = 0.25 * sum(u), 0.25 * sum(v)

    def gradient(f: tuple[Floats, Floats, Floats, Floats]) -> tuple[Floats, Floats]:
        a, b = f[2] - f[0], f[3] - f[1]
        return (a * by - b * ay) / (2.0 * volume), (b * ax - a * bx) / (2.0 * volume)

    (u_x, u_y), (v_x, v_y) = gradient(u), gradient(v)
    result[7], result[8], result[9] = u_x + v_y, v_x - u_y, np.hypot(u_x - v_y, v_x + u_y)
    result[10] = np.log1p(viscous_heating(state, gas, coefficients, volume))
    result[11] = np.log(volume / gas.volume0)
    result[12], result[13] = extreme_jacobians(state.x, state.y)
    fill_shape(result, x, y)
    return result


def fill_thermodynamics(result: Singles, energy: Floats, gas: Gas, volume: Floats) -> None:
    """Set channels 0 to 4.

    Parameters
    ----------
    result : numpy.ndarray
        Channels (18, H, W).
    energy : numpy.ndarray
        Specific internal energy of each cell.
    gas : Gas
        Constants of the run.
    volume : numpy.ndarray
        Area of each cell.
    """
    density = gas.mass / volume
    result[0] = np.log(density)
    result[1] = np.log((gas.gamma - 1.0) * density * energy)
    result[2] = energy
    result[3] = np.sqrt(gas.gamma * (gas.gamma - 1.0) * energy)
    result[4] = gas.gamma


def fill_shape(result: Singles, x: tuple[Floats, ...], y: tuple[Floats, ...]) -> None:
    """Set channels 14 to 17, named as in Robinson, Finite Elements in Analysis and Design 3 (1987).

    Parameters
    ----------
    result : numpy.ndarray
        Channels (18, H, W).
    x : tuple of numpy.ndarray
        Coordinates of the four corners of each cell.
    y : tuple of numpy.ndarray
        Coordinates of the four corners of each cell.
    """
    edges = [np.hypot(x[(c + 1) % 4] - x[c], y[(c + 1) % 4] - y[c]) for c in range(4)]
    ix, iy = 0.5 * (x[1] + x[2] - x[0] - x[3]), 0.5 * (y[1] + y[2] - y[0] - y[3])
    jx, jy = 0.5 * (x[2] + x[3] - x[0] - x[1]), 0.5 * (y[2] + y[3] - y[0] - y[1])
    i_length, j_length = np.hypot(ix, iy), np.hypot(jx, jy)
    result[14] = np.log(i_length / j_length)
    result[15] = np.log(np.maximum.reduce(edges) / np.minimum.reduce(edges))
    result[16] = (ix * jx + iy * jy) / (i_length * j_length)
    diagonals = np.hypot(x[0] - x[1] + x[2] - x[3], y[0] - y[1] + y[2] - y[3])
    result[17] = diagonals / np.minimum(i_length, j_length)


def viscous_heating(state: HydroState, gas: Gas, coefficients: Coefficients, volume: Floats) -> Floats:
    """Return the power of the artificial viscosity per area (H, W), which is not negative.

    Parameters
    ----------
    state : HydroState
    gas : Gas
        Constants of the run.
    coefficients : Coefficients
    volume : numpy.ndarray
        Area of each cell.

    Returns
    -------
    numpy.ndarray
    """
    height, width = gas.mass.shape
    openness = Openness(np.empty((height + 1, width)), np.empty((height, width + 1)))
    fx, fy = np.empty((4, height, width)), np.empty((4, height, width))
    edge_openness(state, openness)
    viscous_forces(state, gas, coefficients, openness, fx, fy)
    heating = np.empty((height, width))
    # From energy 0, in a step of duration 1, with areas in place of masses: the result is the power per area.
    internal_work(np.zeros((height, width)), state.u, state.v, fx, fy, volume, 1.0, heating)
    return np.maximum(heating, 0.0, out=heating)


def extrapolated_jacobian(state: HydroState, tau: float, moments: int = 20) -> Singles:
    """Return the smallest scaled corner Jacobian if all nodes kept their velocity.

    Parameters
    ----------
    state : HydroState
        The state at time t.
    tau : float
        Time horizon.
    moments : int
        Number of equidistant times in (t, t + tau] at which the mesh is evaluated, in addition to t.

    Returns
    -------
    ndarray of float32, shape (H, W)
        Minimum over the times and the corners of the cell.
    """
    record = np.full(state.energy.shape, 2.0, np.float32)
    for time in np.linspace(0.0, tau, moments + 1):
        lower_to_minimum_jacobian(state.x + time * state.u, state.y + time * state.v, record)
    return record
