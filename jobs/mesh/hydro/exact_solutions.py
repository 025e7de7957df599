"""Exact solutions for tests of the solver: Sod's shock tube and Sedov's cylindrical blast."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sqrt

import numpy as np

from .jit import Floats

__all__ = ["SOD", "ShockTube", "UniformState", "blast_constant", "blast_radius"]


@dataclass(frozen=True)
class UniformState:
    """A uniform state of density, velocity and pressure."""

    density: float
    velocity: float
    pressure: float


@dataclass(frozen=True)
class ShockTube:
    """The Riemann problem of an ideal gas: two uniform states that meet at x = 0 at time 0.

    Source: Toro, "Riemann Solvers and Numerical Methods for Fluid Dynamics", chapter 4.
    """

    left: UniformState
    right: UniformState
    gamma: float = 1.4

    def star(self) -> tuple[float, float]:
        """Return pressure and velocity between the two waves, by bisection to round-off."""
        # The jumps of both waves grow with the pressure, so their sum has a single root.
        low, high = 0.0, 100.0 * max(self.left.pressure, self.right.pressure)
        for _ in range(200):
            middle = 0.5 * (low + high)
            gap = self._jump(middle, self.left) + self._jump(middle, self.right)
            if gap + self.right.velocity - self.left.velocity > 0.0:
                high = middle
            else:
                low = middle
        spread = self._jump(low, self.right) - self._jump(low, self.left)
        return low, 0.5 * (self.left.velocity + self.right.velocity + spread)

    def _sound(self, side: UniformState) -> float:
        return sqrt(self.gamma * side.pressure / side.density)

    def _jump(self, pressure: float, side: UniformState) -> float:
        """Return the change of velocity across the wave that takes ``side`` to ``pressure``."""
        gamma = self.gamma
        if pressure > side.pressure:
            a, b = 2.0 / ((gamma + 1.0) * side.density), (gamma - 1.0) / (gamma + 1.0) * side.pressure
            return (pressure - side.pressure) * sqrt(a / (pressure + b))
        ratio = (pressure / side.pressure) ** ((gamma - 1.0) / (2.0 * gamma))
        return float(2.0 * self._sound(side) / (gamma - 1.0) * (ratio - 1.0))

    def density(self, speed: Floats) -> Floats:
        """Return the density at x / t = ``speed``."""
        pressure, velocity = self.star()
        left = self._half(speed, self.left, pressure, velocity)
        # The right wave is the left wave of the mirrored problem.
        mirrored = UniformState(self.right.density, -self.right.velocity, self.right.pressure)
        return np.where(speed < velocity, left, self._half(-speed, mirrored, pressure, -velocity))

    def _half(self, speed: Floats, side: UniformState, pressure: float, velocity: float) -> Floats:
        """Return the density left of the contact; the right side is the mirrored problem."""
        gamma, sound = self.gamma, self._sound(side)
        ratio, g = pressure / side.pressure, (gamma - 1.0) / (gamma + 1.0)
        if ratio > 1.0:
            behind = side.density * (ratio + g) / (g * ratio + 1.0)
            shock = side.velocity - sound * sqrt((ratio + g) / (gamma * (1.0 - g)))
            return np.where(speed < shock, side.density, behind)
        behind = side.density * ratio ** (1.0 / gamma)
        head, tail = side.velocity - sound, velocity - sqrt(gamma * pressure / behind)
        inside = np.clip(speed, head, tail)
        scale = 2.0 / (gamma + 1.0) + g / sound * (side.velocity - inside)
        return np.where(speed < tail, side.density * scale ** (2.0 / (gamma - 1.0)), behind)


SOD = ShockTube(UniformState(1.0, 0.0, 1.0), UniformState(0.125, 0.0, 0.1))


def blast_constant(gamma: float = 1.4, points: int = 4000) -> float:
    """Return ``alpha`` of Sedov's cylindrical blast, whose radius is (E t^2 / (alpha rho))^(1/4).

    With velocity, density and pressure Rdot f, rho g and rho Rdot^2 h of r / R, the equations of motion become ordinary
    differential equations. They are integrated from the strong shock inwards with the classical Runge-Kutta method.
    alpha is pi / 2 times the integral of (g f^2 / 2 + h / (gamma - 1)) r dr, the energy.

    Source: Sedov, "Similarity and Dimensional Methods in Mechanics", chapter 4; two dimensions, R proportional to
    t^(1/2).

    Parameters
    ----------
    gamma : float
        Ratio of specific heats.
    points : int
        Number of integration steps.

    Returns
    -------
    float
        alpha.

    Examples
    --------
    >>> round(blast_constant(1.4), 3)
    0.984
    """

    def slope(r: float, y: Floats) -> Floats:
        f, g, h, _ = y
        w = f - r
        df = (2.0 * h - gamma * h * f / r - g * w * f) / (gamma * h - g * w * w)
        dg = -g * (df + f / r) / w
        dh = g * (f - w * df)
        return np.array([df, dg, dh, -(0.5 * g * f * f + h / (gamma - 1.0)) * r])

    # At r = 1: the jump conditions of a strong shock, and no energy yet.
    y = np.array([2.0 / (gamma + 1.0), (gamma + 1.0) / (gamma - 1.0), 2.0 / (gamma + 1.0), 0.0])
    inner = 1e-3
    step = (inner - 1.0) / points
    for n in range(points):
        r = 1.0 + n * step
        k1 = slope(r, y)
        k2 = slope(r + 0.5 * step, y + 0.5 * step * k1)
        k3 = slope(r + 0.5 * step, y + 0.5 * step * k2)
        k4 = slope(r + step, y + step * k3)
        y = y + step / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4)
    # The remaining disc of radius 0.001 has constant pressure.
    return 0.5 * pi * float(y[3] + y[2] / (gamma - 1.0) * 0.5 * inner**2)


def blast_radius(energy: float, time: float, density: float = 1.0, gamma: float = 1.4) -> float:
    """Return the radius of the shock of a blast that released energy at a point at time 0.

    Parameters
    ----------
    energy : float
        Energy per unit length.
    time : float
        Time since the release.
    density : float
        Density before the shock.
    gamma : float
        Ratio of specific heats.

    Returns
    -------
    float
        The radius.
    """
    return float((energy * time**2 / (blast_constant(gamma) * density)) ** 0.25)
