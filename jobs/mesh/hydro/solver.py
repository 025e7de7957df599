"""The solver: a gas on its mesh, advanced in time.

A step is a predictor-corrector scheme. The current forces move the gas by half a step, and the forces there move it by
the full step. The corrector computes the work of the corner forces with the mean of the old and the new velocity. It
equals the change of kinetic energy exactly, so total energy is constant to round-off.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import numpy as np

from distconv.errors import DataError

from .advance import first_broken_cell, internal_work, move_nodes, predict_nodes, stable_step
from .cell_geometry import areas, corner_volumes
from .forces import corner_forces
from .jit import Floats
from .state import Coefficients, Gas, HydroState, Openness
from .viscosity import edge_openness

__all__ = ["Hydro", "Initial", "RunStopped", "StepControl"]


class RunStopped(Exception):
    """The run cannot continue: a cell lost its area or its internal energy, or the time step collapsed."""


@dataclass(frozen=True)
class Initial:
    """Initial condition. The outer nodes lie on the walls of a rectangle.

    Attributes
    ----------
    x, y, u, v : ndarray, shape (H+1, W+1)
        Positions and velocities of nodes.
    density, pressure, gamma : ndarray, shape (H, W)
        Values of cells.
    """

    x: Floats
    y: Floats
    u: Floats
    v: Floats
    density: Floats
    pressure: Floats
    gamma: Floats


@dataclass(frozen=True)
class StepControl:
    """Settings of the time step.

    Parameters
    ----------
    cfl : float
        Fraction of the acoustic limit.
    volume_change : float
        Largest relative change of a cell's volume in a step.
    growth : float
        Largest ratio of a step to the previous one.
    first : float
        Ratio of the first step to the stable one.
    collapse : float
        The run stops when the step falls below this fraction of the first stable step.
    """

    cfl: float = 0.5
    volume_change: float = 0.1
    growth: float = 1.2
    first: float = 0.2
    collapse: float = 1e-4


@dataclass
class Hydro:
    """A gas on a Lagrangian mesh inside slip walls.

    Parameters
    ----------
    initial : Initial
        Initial condition, which is copied.
    coefficients : Coefficients
        Coefficients of the corner forces.
    control : StepControl
        Settings of the time step.
    work_velocity : str
        ``"mean"``. With ``"end"``, work is computed with the velocity at the end of the step, a common mistake that
        does not conserve energy. It exists so that the test of conservation can be shown to fail.

    Raises
    ------
    DataError
        If area, density or pressure of a cell of the initial condition is not positive.
    """

    initial: InitVar[Initial]
    coefficients: Coefficients = field(default_factory=Coefficients)
    control: StepControl = StepControl()
    work_velocity: str = "mean"
    state: HydroState = field(init=False)
    gas: Gas = field(init=False)
    openness: Openness = field(init=False)
    time: float = field(init=False, default=0.0)
    steps: int = field(init=False, default=0)

    def __post_init__(self, initial: Initial) -> None:
        volume0 = areas(initial.x, initial.y)
        if not (volume0 > 0).all() or not (initial.density > 0).all() or not (initial.pressure > 0).all():
            raise DataError("initial condition: area, density and pressure of each cell must be positive")
        subzones = corner_volumes(initial.x, initial.y)
        mass = initial.density * volume0
        self.gas = Gas(mass, initial.gamma.copy(), volume0, subzones / volume0, node_masses(subzones * initial.density))
        energy = initial.pressure / ((initial.gamma - 1.0) * initial.density)
        self.state = HydroState(initial.x.copy(), initial.y.copy(), initial.u.copy(), initial.v.copy(), energy)
        hold_walls(self.state)
        height, width = mass.shape
        self.openness = Openness(np.empty((height + 1, width)), np.empty((height, width + 1)))
        self._half = HydroState(*(np.empty_like(array) for array in self.state))
        self._fx, self._fy = np.empty((4, height, width)), np.empty((4, height, width))
        # step() limits the growth from the last step, so this makes the first step ``first`` times the stable one.
        first_stable = self._stable_step()
        self._last_step = self.control.first * first_stable / self.control.growth
        self._smallest_step = self.control.collapse * first_stable

    def _stable_step(self) -> float:
        return stable_step(self.state, self.gas, self.control.cfl, self.control.volume_change)

    def _forces(self, state: HydroState) -> None:
        edge_openness(state, self.openness)
        corner_forces(state, self.gas, self.coefficients, self.openness, self._fx, self._fy)

    def step(self, end: float) -> float:
        """Advance by one stable step, but not beyond the time ``end``, and return the step.

        Raises
        ------
        RunStopped
            If the run cannot continue.
        """
        stable = min(self._stable_step(), self.control.growth * self._last_step)
        if not stable > self._smallest_step:  # true for NaN
            raise RunStopped(f"time {self.time:.4f}, step {self.steps}: the time step fell to {stable:.3g}")
        self._last_step = stable  # not dt, which may be short because the time ``end`` is near
        dt = min(stable, end - self.time)
        self._advance(dt)
        # Exactly the end: a sum of steps would miss it by a rounding error.
        self.time = end if dt == end - self.time else self.time + dt
        self.steps += 1
        cell = first_broken_cell(self.state)
        if cell >= 0:
            row, column = divmod(cell, self.gas.mass.shape[1])
            raise RunStopped(f"time {self.time:.4f}, step {self.steps}: cell ({row}, {column}) lost its area or energy")
        return dt

    def _advance(self, dt: float) -> None:
        """Advance all variables by ``dt``.

        ::

            [1]  forces of the state
            [2]  nodes and energies half a step later
            [3]  forces there
            [4]  nodes a full step later; ``half`` receives their mean velocities
            [5]  energies a full step later, by the work of the forces [3] on nodes with these velocities
        """
        state, gas, half, fx, fy = self.state, self.gas, self._half, self._fx, self._fy
        self._forces(state)  # [1]
        predict_nodes(state, gas, fx, fy, 0.5 * dt, half)  # [2]
        internal_work(state.energy, half.u, half.v, fx, fy, gas.mass, 0.5 * dt, half.energy)
        self._forces(half)  # [3]
        move_nodes(state, gas, fx, fy, dt, half)  # [4]
        work = half if self.work_velocity == "mean" else state
        internal_work(state.energy, work.u, work.v, fx, fy, gas.mass, dt, state.energy)  # [5]

    def run(self, end: float) -> None:
        """Advance to the time ``end``.

        Raises
        ------
        RunStopped
            If the run cannot continue.
        """
        while self.time < end:
            self.step(end)

    def kinetic_energy(self) -> float:
        """Return the kinetic energy of the nodes."""
        return 0.5 * float(np.sum(self.gas.node_mass * (self.state.u**2 + self.state.v**2)))

    def total_energy(self) -> float:
        """Return the kinetic energy of the nodes plus the internal energy of the cells."""
        return self.kinetic_energy() + float(np.sum(self.gas.mass * self.state.energy))

    def volumes(self) -> Floats:
        """Return the current area of each cell (H, W)."""
        return areas(self.state.x, self.state.y)

    def density(self) -> Floats:
        """Return the current density of each cell (H, W)."""
        return self.gas.mass / self.volumes()


def node_masses(corner_mass: Floats) -> Floats:
    """Return the mass of each node (H+1, W+1): the sum of the subzones (4, H, W) around it."""
    _, height, width = corner_mass.shape
    mass = np.zeros((height + 1, width + 1))
    for corner, (dj, di) in enumerate(((0, 0), (0, 1), (1, 1), (1, 0))):
        mass[dj : dj + height, di : di + width] += corner_mass[corner]
    return mass


def hold_walls(state: HydroState) -> None:
    """Set the velocity normal to the walls to zero."""
    state.u[:, [0, -1]] = 0.0
    state.v[[0, -1], :] = 0.0
