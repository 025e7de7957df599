"""What the kernels work on: named groups of arrays, which numba takes as they are."""

from __future__ import annotations

from typing import NamedTuple

from .jit import Floats

__all__ = ["Coefficients", "Gas", "HydroState", "Openness"]


class HydroState(NamedTuple):
    """What changes: positions and velocities of nodes (H+1, W+1), specific internal energy of cells (H, W)."""

    x: Floats
    y: Floats
    u: Floats
    v: Floats
    energy: Floats

    def copy(self) -> HydroState:
        """The same in arrays of its own."""
        return HydroState(*(array.copy() for array in self))


class Gas(NamedTuple):
    """What a Lagrangian cell keeps.

    ``mass``, ``gamma`` and ``volume0``, the initial area, are (H, W); ``fraction`` is the share of the cell's mass in
    each of its subzones (4, H, W); ``node_mass`` (H+1, W+1) sums the subzones around a node.
    """

    mass: Floats
    gamma: Floats
    volume0: Floats
    fraction: Floats
    node_mass: Floats


class Openness(NamedTuple):
    """1 - psi of the viscosity limiter on the edges along x (H+1, W) and along y (H, W+1)."""

    along_x: Floats
    along_y: Floats


class Coefficients(NamedTuple):
    """Dimensionless strengths of the corner forces.

    ``linear`` and ``quadratic`` belong to the artificial viscosity. ``hourglass`` damps the hourglass velocity;
    ``subzone`` weights the subzonal pressures and stays small: near 1 it all but stops corners from inverting, and the
    time step collapses.
    """

    linear: float = 0.5
    quadratic: float = 1.0
    hourglass: float = 0.1
    subzone: float = 0.05
