"""Small gases for the tests of the hydrodynamics code."""

from __future__ import annotations

import numpy as np

from distconv.jobs.mesh.hydro.jit import Floats
from distconv.jobs.mesh.hydro.solver import Hydro, Initial


def box(columns: int, rows: int, cell: float) -> tuple[Floats, Floats]:
    """Nodes of a regular mesh."""
    x, y = np.meshgrid(np.arange(columns + 1) * cell, np.arange(rows + 1) * cell)
    return x, y


def at_rest(x: Floats, y: Floats, density: Floats, pressure: Floats, gamma: float = 1.4) -> Initial:
    return Initial(x, y, np.zeros_like(x), np.zeros_like(x), density, pressure, np.full_like(density, gamma))


def warped(seed: int = 0, size: int = 6) -> Hydro:
    """A gas at rest on a mesh of irregular cells."""
    x, y = box(size, size, 1.0)
    rng = np.random.default_rng(seed)
    x[1:-1, 1:-1] += rng.uniform(-0.2, 0.2, (size - 1, size - 1))
    y[1:-1, 1:-1] += rng.uniform(-0.2, 0.2, (size - 1, size - 1))
    cells = (size, size)
    return Hydro(at_rest(x, y, rng.uniform(0.5, 2.0, cells), rng.uniform(0.5, 2.0, cells)))
