"""Kernels of a time step: stable step, motion of nodes, work done on cells."""

from __future__ import annotations

from math import inf, sqrt

import numpy as np

from .jit import Floats, kernel
from .state import Gas, HydroState

__all__ = ["first_broken_cell", "internal_work", "move_nodes", "predict_nodes", "stable_step"]


@kernel
def stable_step(state: HydroState, gas: Gas, cfl: float, volume_change: float) -> float:
    """Return the largest time step that every cell allows.

    Acoustic limit: ``cfl`` times 2/omega, where omega is the highest frequency of the isolated cell on its own corner
    masses, omega^2 = (rho c^2 / V) sum |dV/dx_k|^2 / m_k. No frequency of the assembled mesh exceeds it (Fried's
    theorem).
    For the artificial viscosity, the sound speed is raised by the velocity jump across a cell under compression.

    Parameters
    ----------
    state : HydroState
        The state.
    gas : Gas
        Constants of the run.
    cfl : float
        Fraction of the acoustic limit.
    volume_change : float
        Largest relative change of a cell's volume in a step.

    Returns
    -------
    float
        The step.
    """
    x, y, u, v, energy = state
    height, width = gas.mass.shape
    step, row, f = inf, np.empty(width), gas.fraction
    for j in range(height):
        k = j + 1
        for i in range(width):
            m = i + 1
            # Diagonals 0-2 and 1-3. |dV/dx| of a corner is half the length of the diagonal between its neighbours.
            ax, ay = x[k, m] - x[j, i], y[k, m] - y[j, i]
            bx, by = x[k, i] - x[j, m], y[k, i] - y[j, m]
            volume = 0.5 * (ax * by - bx * ay)
            a_u, a_v = u[k, m] - u[j, i], v[k, m] - v[j, i]
            b_u, b_v = u[k, i] - u[j, m], v[k, i] - v[j, m]
            divergence = 0.5 * (a_u * by - b_u * ay + ax * b_v - bx * a_v) / volume
            gamma = gas.gamma[j, i]
            sound = sqrt(gamma * (gamma - 1.0) * max(energy[j, i], 0.0))
            sound += 0.5 * (gamma + 1.0) * max(0.0, -divergence) * sqrt(volume)
            # With the corner masses f rho V, omega is c sqrt(stiffness) / V.
            stiffness = 0.25 * (
                (bx * bx + by * by) * (1.0 / f[0, j, i] + 1.0 / f[2, j, i])
                + (ax * ax + ay * ay) * (1.0 / f[1, j, i] + 1.0 / f[3, j, i])
            )
            acoustic = 2.0 * cfl * volume / (sound * sqrt(stiffness))
            row[i] = min(acoustic, volume_change / max(abs(divergence), 1e-300))
        # In a loop of its own, so that the loop above is vectorized.
        for limit in row:
            step = min(step, limit)
    return step


@kernel
def gather_row(corner_force: Floats, j: int, force: Floats) -> None:
    """Set ``force`` (W+1) to the sum of the corner forces (4, H, W) of the cells around each node of row ``j``.

    Parameters
    ----------
    corner_force : numpy.ndarray
    j : int
        Row of cells.
    force : numpy.ndarray
        Receives the result.
    """
    height, width = corner_force.shape[1], corner_force.shape[2]
    force[:] = 0.0
    if j < height:
        for i in range(width):
            force[i] += corner_force[0, j, i]
        for i in range(width):
            force[i + 1] += corner_force[1, j, i]
    if j > 0:
        for i in range(width):
            force[i + 1] += corner_force[2, j - 1, i]
        for i in range(width):
            force[i] += corner_force[3, j - 1, i]


@kernel
def gather_forces(fx: Floats, fy: Floats, j: int, force_x: Floats, force_y: Floats) -> None:
    """Set ``force_x, force_y`` to the forces on the nodes of row ``j``. Slip walls take up the normal force.

    Parameters
    ----------
    fx : numpy.ndarray
        Corner forces along x (4, H, W).
    fy : numpy.ndarray
        Corner forces along y (4, H, W).
    j : int
        Row of nodes.
    force_x : numpy.ndarray
        Receives the forces along x (W+1).
    force_y : numpy.ndarray
        Receives the forces along y (W+1).
    """
    gather_row(fx, j, force_x)
    gather_row(fy, j, force_y)
    # Without a normal force the normal velocity at the walls stays 0, as hold_walls() has set it.
    force_x[0] = 0.0
    force_x[-1] = 0.0
    if j == 0 or j == fy.shape[1]:
        force_y[:] = 0.0


@kernel
def predict_nodes(state: HydroState, gas: Gas, fx: Floats, fy: Floats, half_step: float, half: HydroState) -> None:
    """Set the nodes of ``half`` to those of ``state`` half a step later.

    Parameters
    ----------
    state : HydroState
        The state.
    gas : Gas
        Constants of the run.
    fx, fy : ndarray, shape (4, H, W)
        Corner forces.
    half_step : float
        Half of the time step.
    half : HydroState
        Positions and velocities are overwritten.
    """
    rows, columns = state.x.shape
    force_x, force_y = np.empty(columns), np.empty(columns)
    for j in range(rows):
        gather_forces(fx, fy, j, force_x, force_y)
        for i in range(columns):
            scale = half_step / gas.node_mass[j, i]
            u, v = state.u[j, i] + scale * force_x[i], state.v[j, i] + scale * force_y[i]
            half.u[j, i] = u
            half.v[j, i] = v
            half.x[j, i] = state.x[j, i] + half_step * u
            half.y[j, i] = state.y[j, i] + half_step * v


@kernel
def move_nodes(state: HydroState, gas: Gas, fx: Floats, fy: Floats, step: float, half: HydroState) -> None:
    """Advance the nodes of ``state`` in place by a full step, and store the mean velocity over the step in ``half``.

    Parameters
    ----------
    state, gas, fx, fy
        As in :func:`predict_nodes`.
    step : float
        The time step.
    half : HydroState
        Velocities are overwritten.
    """
    rows, columns = state.x.shape
    force_x, force_y = np.empty(columns), np.empty(columns)
    for j in range(rows):
        gather_forces(fx, fy, j, force_x, force_y)
        for i in range(columns):
            scale = step / gas.node_mass[j, i]
            u, v = state.u[j, i] + scale * force_x[i], state.v[j, i] + scale * force_y[i]
            # The same mean moves the nodes and computes the work on the cells; otherwise energy is not conserved.
            mean_u, mean_v = 0.5 * (state.u[j, i] + u), 0.5 * (state.v[j, i] + v)
            half.u[j, i] = mean_u
            half.v[j, i] = mean_v
            state.x[j, i] += step * mean_u
            state.y[j, i] += step * mean_v
            state.u[j, i] = u
            state.v[j, i] = v


@kernel
def internal_work(
    energy: Floats, u: Floats, v: Floats, fx: Floats, fy: Floats, mass: Floats, step: float, result: Floats
) -> None:
    """Set ``result`` to the specific internal energy after the work of the corner forces.

    Parameters
    ----------
    energy : ndarray, shape (H, W)
        Specific internal energy before.
    u, v : ndarray, shape (H+1, W+1)
        Velocities of the nodes on which the forces do work.
    fx, fy : ndarray, shape (4, H, W)
        Corner forces.
    mass : ndarray, shape (H, W)
        Masses of cells.
    step : float
        Duration.
    result : ndarray, shape (H, W)
        Overwritten; may be ``energy``.
    """
    for j in range(mass.shape[0]):
        k = j + 1
        for i in range(mass.shape[1]):
            m = i + 1
            power_x = fx[0, j, i] * u[j, i] + fx[1, j, i] * u[j, m] + fx[2, j, i] * u[k, m] + fx[3, j, i] * u[k, i]
            power_y = fy[0, j, i] * v[j, i] + fy[1, j, i] * v[j, m] + fy[2, j, i] * v[k, m] + fy[3, j, i] * v[k, i]
            result[j, i] = energy[j, i] - step / mass[j, i] * (power_x + power_y)


@kernel
def first_broken_cell(state: HydroState) -> int:
    """Return the flat index of the first cell whose area or internal energy is not positive, or -1."""
    x, y, _, _, energy = state
    height, width = energy.shape
    for j in range(height):
        k = j + 1
        for i in range(width):
            m = i + 1
            area = (x[k, m] - x[j, i]) * (y[k, i] - y[j, m]) - (x[k, i] - x[j, m]) * (y[k, m] - y[j, i])
            # Written so that NaN counts as broken.
            if not (area > 0.0 and energy[j, i] > 0.0):
                return int(j * width + i)
    return -1
