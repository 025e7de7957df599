"""Named groups of arrays that kernels take as arguments. They are named tuples, which numba supports."""

from __future__ import annotations

from typing import NamedTuple

from .jit import Floats

__all__ = ["Coefficients", "Gas", "HydroState", "Openness"]


class HydroState(NamedTuple):
    """Variables of the solver.

    Attributes
    ----------
    x, y, u, v : ndarray, shape (H+1, W+1)
        Positions and velocities of nodes.
    energy : ndarray, shape (H, W)
        Specific internal energy of cells.
    """

    x: Floats
    y: Floats
    u: Floats
    v: Floats
    energy: Floats

    def copy(self) -> HydroState:
        """Return a copy with arrays of its own."""
        return HydroState(*(array.copy() for array in self))


class Gas(NamedTuple):
    """Constants of a run.

    Attributes
    ----------
    mass, gamma : ndarray, shape (H, W)
        Mass and ratio of specific heats of each cell.
    volume0 : ndarray, shape (H, W)
        Initial area of each cell.
    fraction : ndarray, shape (4, H, W)
        Fraction of the cell's mass in each of its subzones.
    node_mass : ndarray, shape (H+1, W+1)
        Sum of the masses of the subzones around each node.
    """

    mass: Floats
    gamma: Floats
    volume0: Floats
    fraction: Floats
    node_mass: Floats


class Openness(NamedTuple):
    """Factor of the viscosity of each edge: 0 where the velocity is linear along a mesh line, up to 1 in a shock.

    It is 1 - psi, where psi is the limiter of :func:`.viscosity.openness`. Edges along x have shape (H+1, W), and edges
    along y have shape (H, W+1).
    """

    along_x: Floats
    along_y: Floats


class Coefficients(NamedTuple):
    """Dimensionless coefficients of the corner forces.

    Parameters
    ----------
    linear, quadratic : float
        Coefficients of the artificial viscosity.
    hourglass : float
        Damping of the hourglass velocity.
    subzone : float
        Weight of the subzonal pressures. Keep it small: near 1 corners hardly invert and the time step collapses.
    """

    linear: float = 0.5
    quadratic: float = 1.0
    hourglass: float = 0.1
    subzone: float = 0.05
