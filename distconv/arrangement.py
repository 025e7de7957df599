"""Arrangements: where ranks are along named axes. Pure arithmetic; a process grid is one with a communicator."""

from __future__ import annotations

import math
from collections.abc import Iterable

from distconv.errors import GridError

AXES = ("n", "c", "d", "h", "w", "r")
"""Samples, channels, depth, height, width, and plain replicas."""

SLOWEST_FIRST = ("r", "n", "d", "h", "w", "c")
"""Rank order: neighbours along ``c``, then along the spatial axes, share a node."""


class Arrangement:
    """Ranks along named axes, without a communicator: any rank works out where any other one is.

    Axes left out of ``axes`` have one part.

    Raises
    ------
    GridError
        If an axis is unknown, or a number of parts is no positive whole number.
    """

    def __init__(self, **axes: int) -> None:
        for name, parts in axes.items():
            if name not in AXES:
                raise GridError(f"process grid: unknown axis {name!r}; the axes are {', '.join(AXES)}")
            if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
                raise GridError(f"process grid: {name}={parts!r} must be a positive number of parts")
        self.shape = {name: axes.get(name, 1) for name in AXES}
        self.size = math.prod(self.shape.values())

    def coords_of(self, rank: int) -> dict[str, int]:
        """Coordinate along every axis of ``rank``."""
        coords: dict[str, int] = {}
        for name in reversed(SLOWEST_FIRST):
            rank, coords[name] = divmod(rank, self.shape[name])
        return coords

    def rank_of(self, coords: dict[str, int]) -> int:
        """Rank at ``coords``; axes left out count as 0."""
        rank = 0
        for name in SLOWEST_FIRST:
            rank = rank * self.shape[name] + coords.get(name, 0)
        return rank

    def split_axes(self, axes: Iterable[str | None]) -> tuple[str, ...]:
        """Those of ``axes`` that really split something (more than one part), in canonical order."""
        wanted = set(axes)
        return tuple(name for name in AXES if name in wanted and self.shape[name] > 1)

    def describe(self) -> str:
        """The grid as users write it, for example ``n=2,h=2``."""
        return ",".join(f"{k}={v}" for k, v in self.shape.items() if v != 1) or "n=1"


def parse_grid(text: str) -> dict[str, int]:
    """Extents from their written form: ``"n=2,h=2"`` gives ``{"n": 2, "h": 2}``.

    Raises
    ------
    GridError
        If ``text`` is not a comma-separated list of ``axis=parts``.

    >>> parse_grid("n=2,h=2")
    {'n': 2, 'h': 2}
    """
    axes: dict[str, int] = {}
    for item in text.replace(" ", "").split(","):
        name, equals, parts = item.partition("=")
        if not equals or name not in AXES or not parts.isdecimal() or int(parts) < 1 or name in axes:
            raise GridError(
                f"grid {text!r}: {item!r} is not one axis=parts (axes {', '.join(AXES)}); write it like n=2,h=2"
            )
        axes[name] = int(parts)
    return axes
