"""Seeded initial conditions in five families of flow.

The side of an initial cell is 1/128 for every size. A larger mesh is a larger domain with proportionally more vortices,
layers, tiles and bubbles of the same sizes, so samples of all sizes have the same statistics. All random numbers come
from one generator: family, size and seed determine a run.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, pi

import numpy as np

from .jit import Floats
from .solver import Initial

__all__ = ["CELLS_PER_UNIT", "FAMILIES", "initial_condition"]

CELLS_PER_UNIT = 128

# Root mean square speed of a flow. Together with the unit of length it determines how fast a mesh degrades: within two
# to five times the time horizon of a label.
SPEED = 0.55


class Sketch:
    """A flow during its construction: fields on the nodes (S+1, S+1) of a regular mesh of S x S cells."""

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        self.rng, self.size = rng, size
        self.side = size / CELLS_PER_UNIT
        line = np.arange(size + 1) / CELLS_PER_UNIT
        self.x, self.y = np.meshgrid(line, line)
        # 0 on the walls with zero slope, 1 from a tenth of a unit inwards.
        distance = np.clip(np.minimum(line, self.side - line) / min(0.1, self.side / 4), 0.0, 1.0)
        taper = distance**2 * (3.0 - 2.0 * distance)
        self.inside = np.outer(taper, taper)
        self.density, self.pressure = np.ones_like(self.x), np.ones_like(self.x)
        self.gamma = np.full_like(self.x, rng.choice([1.4, 5.0 / 3.0]))
        self.u, self.v = np.zeros_like(self.x), np.zeros_like(self.x)

    def feature_count(self, per_unit_area: float) -> int:
        """Return the number of features, at least one, for a frequency per unit area."""
        return max(1, round(per_unit_area * self.side**2))

    def smooth_noise(self, spacing: float, *, odd_at_walls: bool = False) -> Floats:
        """Return a random field of about unit variance: a cubic spline of white noise.

        Parameters
        ----------
        spacing : float
            Length over which the field varies.
        odd_at_walls : bool
            If True, the field is odd about each wall and therefore zero there. As a stream function it has no jets
            along the walls.

        Returns
        -------
        ndarray, shape (S+1, S+1)
            The field.
        """
        intervals = ceil(self.side / spacing)
        noise = self.rng.standard_normal((intervals + 3, intervals + 3))
        if odd_at_walls:
            # Coefficient 1 belongs to the wall, and coefficient 0 lies one interval beyond it.
            for line in (noise, noise.T):
                line[1], line[-2] = 0.0, 0.0
                line[0], line[-1] = -line[2], -line[-3]
        basis = spline_basis(self.size, intervals)
        field: Floats = basis @ noise @ basis.T
        return 2.0 * field  # the splines average the noise to a variance of about 1/4

    def add_stream(self, stream: Floats, speed: float) -> None:
        """Add the flow of a stream function that is zero at the walls, scaled to a root mean square ``speed``.

        Parameters
        ----------
        stream : numpy.ndarray
            Stream function on the nodes (S+1, S+1).
        speed : float
            Root mean square of the added velocity.
        """
        slope_y, slope_x = np.gradient(stream, 1.0 / CELLS_PER_UNIT)
        scale = speed / max(float(np.sqrt(np.mean(slope_x**2 + slope_y**2))), 1e-12)
        # Free of divergence, and along the walls, where the stream function is constant.
        self.u += scale * slope_y
        self.v -= scale * slope_x

    def add_gaussian(self, field: Floats, centre: Floats, radius: float, amount: float) -> None:
        """Add a Gaussian to ``field``, cut off at four radii.

        Parameters
        ----------
        field : ndarray, shape (S+1, S+1)
            Changed in place.
        centre : ndarray, shape (2,)
            Position (x, y); may lie outside the domain.
        radius : float
            Distance at which the Gaussian has fallen to 1/e.
        amount : float
            Value at the center.
        """
        low = np.maximum(np.floor((centre - 4.0 * radius) * CELLS_PER_UNIT), 0).astype(int)
        high = np.maximum(np.ceil((centre + 4.0 * radius) * CELLS_PER_UNIT) + 1, 0).astype(int)
        window = (slice(low[1], high[1]), slice(low[0], high[0]))
        squared = (self.x[window] - centre[0]) ** 2 + (self.y[window] - centre[1]) ** 2
        field[window] += amount * np.exp(-squared / radius**2)

    def disc(self, centre: Floats, radius: float) -> Floats:
        """Return a field that is 1 inside a disc and 0 outside, with a transition of about three cells.

        Parameters
        ----------
        centre : numpy.ndarray
            Center (x, y).
        radius : float

        Returns
        -------
        numpy.ndarray
        """
        distance = np.hypot(self.x - centre[0], self.y - centre[1])
        inside: Floats = 0.5 * (1.0 - np.tanh((distance - radius) * CELLS_PER_UNIT / 1.5))
        return inside

    def random_point(self) -> Floats:
        """Return a random point (x, y) of the domain."""
        point: Floats = self.rng.uniform(0.0, self.side, 2)
        return point


def spline_basis(size: int, intervals: int) -> Floats:
    """Return uniform cubic B-splines (S+1, intervals + 3) at the S+1 equidistant points of a line.

    Parameters
    ----------
    size : int
        S.
    intervals : int
        Number of intervals of the splines.

    Returns
    -------
    numpy.ndarray
    """
    position = np.linspace(0.0, intervals, size + 1)[:, None] - np.arange(-1, intervals + 2)[None, :]
    distance = np.abs(position)
    near = 2.0 / 3.0 - distance**2 * (1.0 - 0.5 * distance)
    far = np.clip(2.0 - distance, 0.0, None) ** 3 / 6.0
    return np.where(distance < 1.0, near, far)


def sound_pressure(sketch: Sketch, speed: float) -> float:
    """Return the pressure at which gas of unit density and ``speed`` has a Mach number drawn from 0.5 to 1.2.

    Parameters
    ----------
    sketch : Sketch
    speed : float

    Returns
    -------
    float
    """
    mach = sketch.rng.uniform(0.5, 1.2)
    return float(speed**2 / (sketch.gamma.flat[0] * mach**2))


def high_speed(sketch: Sketch) -> float:
    """Return the speed that 1 % of the nodes exceed. The maximum would grow with the size of the domain."""
    return float(np.quantile(np.hypot(sketch.u, sketch.v), 0.99))


def taylor_green(sketch: Sketch) -> None:
    """Set up rows of counter-rotating vortices, one to three per unit length, of different strengths."""
    columns, rows = (max(1, round(sketch.rng.uniform(1.5, 3.0) * sketch.side)) for _ in range(2))
    stream = np.sin(pi * columns * sketch.x / sketch.side) * np.sin(pi * rows * sketch.y / sketch.side)
    sketch.add_stream(stream * (1.0 + 0.4 * sketch.smooth_noise(0.3)), SPEED)
    sketch.pressure *= sound_pressure(sketch, high_speed(sketch))


def random_vortices(sketch: Sketch) -> None:
    """Set up Gaussian vortices of both signs and random radius, ten per unit area, with mirror images at the walls."""
    stream = np.zeros_like(sketch.x)
    for _ in range(sketch.feature_count(10.0)):
        (x, y), radius = sketch.random_point(), sketch.rng.uniform(0.08, 0.2)
        strength = radius * sketch.rng.normal()
        # With the images the stream function is odd about each wall, and so zero there.
        for image_x, sign_x in ((x, 1.0), (-x, -1.0), (2.0 * sketch.side - x, -1.0)):
            for image_y, sign_y in ((y, 1.0), (-y, -1.0), (2.0 * sketch.side - y, -1.0)):
                sketch.add_gaussian(stream, np.array([image_x, image_y]), radius, strength * sign_x * sign_y)
    sketch.add_stream(stream, SPEED)
    sketch.pressure *= sound_pressure(sketch, high_speed(sketch))


def shear(sketch: Sketch) -> None:
    """Set up wavy layers that slide past one another in alternate directions; the density varies across them."""
    layers = max(1, round(sketch.rng.uniform(1.5, 3.0) * sketch.side))
    across, along = (sketch.y, sketch.x) if sketch.rng.random() < 0.5 else (sketch.x, sketch.y)
    wave = 0.03 * np.sin(2.0 * pi * along / sketch.rng.uniform(0.25, 0.5)) + 0.02 * sketch.smooth_noise(0.2)
    phase = pi * layers * (across + wave * sketch.inside) / sketch.side
    # The stream function is a rounded triangle wave. Its slope, the velocity, is constant in most of a layer and
    # changes sign within a fraction of it. The flow vanishes over a quarter of a unit at the ends of the layers.
    distance = np.clip(np.minimum(along, sketch.side - along) / min(0.25, sketch.side / 4), 0.0, 1.0)
    sketch.add_stream(np.arcsin(0.97 * np.sin(phase)) * np.sin(0.5 * pi * distance), SPEED)
    sketch.add_stream(sketch.smooth_noise(0.2, odd_at_walls=True), 0.3 * SPEED)
    sketch.density *= np.exp(sketch.rng.uniform(-0.7, 0.7) * np.cos(phase))
    sketch.pressure *= sound_pressure(sketch, high_speed(sketch))


def triple_point(sketch: Sketch) -> None:
    """Set up tiles of about one unit in which three gases meet: one of high pressure, a dense one and a light one.

    Each gas has its own gamma. The shock runs faster through the light gas and rolls up the contact between the two.
    """
    base = 2.0 * sound_pressure(sketch, 2.0 * SPEED)
    tiles = max(1, round(sketch.side))
    width = sketch.side / tiles
    local_x, local_y = (sketch.x / width) % 1.0, (sketch.y / width) % 1.0
    tile_of = np.clip((sketch.y // width) * tiles + sketch.x // width, 0, tiles * tiles - 1).astype(int)
    for tile in range(tiles * tiles):
        here = tile_of == tile
        a, b = local_x[here], local_y[here]
        a, b = (b, a) if sketch.rng.random() < 0.5 else (a, b)
        a = 1.0 - a if sketch.rng.random() < 0.5 else a
        softness = width * CELLS_PER_UNIT / 1.5
        driver = 0.5 * (1.0 - np.tanh((a - sketch.rng.uniform(0.2, 0.4)) * softness))
        light = (1.0 - driver) * 0.5 * (1.0 + np.tanh((b - sketch.rng.uniform(0.35, 0.65)) * softness))
        high, low = base * sketch.rng.uniform(0.8, 1.3), base * sketch.rng.uniform(0.1, 0.25)
        gammas = sketch.rng.permutation([1.3, 1.4, 1.5, 5.0 / 3.0])
        sketch.pressure[here] = low + (high - low) * driver
        sketch.density[here] = 1.0 - sketch.rng.uniform(0.6, 0.85) * light
        sketch.gamma[here] = gammas[0] + (gammas[1] - gammas[0]) * driver + (gammas[2] - gammas[0]) * light
    sketch.add_stream(sketch.smooth_noise(0.2, odd_at_walls=True), 0.7 * SPEED)


def blasts(sketch: Sketch) -> None:
    """Set up hot spots that explode among bubbles of light and dense gas, in a weak random flow."""
    base = sound_pressure(sketch, 2.0 * SPEED)
    for _ in range(sketch.feature_count(8.0)):
        bubble = sketch.disc(sketch.random_point(), sketch.rng.uniform(0.05, 0.14))
        sketch.density *= np.exp(sketch.rng.uniform(-1.6, 1.2) * bubble)
        sketch.gamma += (sketch.rng.choice([1.2, 1.4, 5.0 / 3.0]) - sketch.gamma) * bubble
    sketch.pressure *= base
    for _ in range(sketch.feature_count(3.0)):
        sketch.add_gaussian(
            sketch.pressure, sketch.random_point(), sketch.rng.uniform(0.03, 0.06), base * sketch.rng.uniform(5.0, 20.0)
        )
    sketch.add_stream(sketch.smooth_noise(0.2, odd_at_walls=True), 0.7 * SPEED)


FAMILIES: dict[str, Callable[[Sketch], None]] = {
    "taylor-green": taylor_green,
    "vortices": random_vortices,
    "shear": shear,
    "triple-point": triple_point,
    "blasts": blasts,
}


def initial_condition(family: str, size: int, seed: np.random.SeedSequence) -> Initial:
    """Return the initial condition of a run, with small smooth perturbations of mesh and density.

    Parameters
    ----------
    family : str
        A key of ``FAMILIES``.
    size : int
        Number of cells along each side.
    seed : numpy.random.SeedSequence
        Seed of all random numbers.

    Returns
    -------
    Initial
        The initial condition.
    """
    # All random numbers come from one generator: another order of these lines is another run for every seed.
    sketch = Sketch(np.random.default_rng(seed), size)
    FAMILIES[family](sketch)
    sketch.density *= np.exp(0.15 * sketch.smooth_noise(0.15))
    spacing = sketch.rng.uniform(0.12, 0.25)
    shift = 0.06 * spacing * sketch.inside
    x = sketch.x + shift * sketch.smooth_noise(spacing)
    y = sketch.y + shift * sketch.smooth_noise(spacing)
    density, pressure, gamma = (cell_mean(field) for field in (sketch.density, sketch.pressure, sketch.gamma))
    return Initial(x=x, y=y, u=sketch.u, v=sketch.v, density=density, pressure=pressure, gamma=gamma)


def cell_mean(nodes: Floats) -> Floats:
    """Return the mean of the four nodes of each cell."""
    mean: Floats = 0.25 * (nodes[:-1, :-1] + nodes[:-1, 1:] + nodes[1:, 1:] + nodes[1:, :-1])
    return mean
