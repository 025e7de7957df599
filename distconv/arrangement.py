"""Arrangements: where ranks are along named axes. Pure arithmetic; a process grid is one with a communicator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from distconv.errors import GridError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ranks = TypeVar("Ranks", int, npt.NDArray[np.int64])
else:
    Ranks = TypeVar("Ranks")

AXES = ("n", "c", "d", "h", "w", "r")
"""Samples, channels, depth, height, width, and plain replicas."""

SLOWEST_FIRST = ("r", "n", "d", "h", "w", "c")
"""Rank order: neighbours along ``c``, then along the spatial axes, share a node."""


class Arrangement:
    """Ranks along named axes, without a communicator: any rank works out where any other one is.

    Axes left out of ``axes`` have one part. Two arrangements of the same extents are equal.

    Raises
    ------
    GridError
        If an axis is unknown or an extent is not a positive integer.

    Examples
    --------
    >>> Arrangement(n=2, h=2).coords_of(3)["h"], Arrangement(n=2, h=2).stride("n")
    (1, 2)
    """

    def __init__(self, **axes: int) -> None:
        for name, parts in axes.items():
            if name not in AXES:
                raise GridError(f"process grid: unknown axis {name!r}; the axes are {', '.join(AXES)}")
            if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
                raise GridError(f"process grid: {name}={parts!r} must be a positive number of parts")
        self.shape = {name: axes.get(name, 1) for name in AXES}
        self.size = math.prod(self.shape.values())
        self._strides: dict[str, int] = {}
        stride = 1
        for name in reversed(SLOWEST_FIRST):
            self._strides[name] = stride
            stride *= self.shape[name]

    @cached_property
    def key(self) -> Any:
        """What makes two arrangements equal: their extents."""
        return tuple(self.shape.values())

    @property
    def coords(self) -> dict[str, int]:
        """The coordinates of this rank; only a process grid knows which one that is.

        Raises
        ------
        GridError
            Always: here no rank is this one.
        """
        raise GridError(f"{self!r} is over no communicator: say which rank is meant")

    def stride(self, axis: str) -> int:
        """How far apart neighbours along ``axis`` are in the order of the ranks."""
        return self._strides[axis]

    def coordinate(self, axis: str, rank: Ranks) -> Ranks:
        """Coordinate of ``rank`` (or of an array of ranks) along ``axis``."""
        return rank // self._strides[axis] % self.shape[axis]

    def coords_of(self, rank: int) -> dict[str, int]:
        """Coordinate along every axis of ``rank``."""
        return {name: self.coordinate(name, rank) for name in AXES}

    def rank_of(self, coords: Mapping[str, int]) -> int:
        """Rank at ``coords``; axes left out count as 0."""
        return sum(index * self._strides[name] for name, index in coords.items())

    def split_axes(self, axes: Iterable[str | None]) -> tuple[str, ...]:
        """Those of ``axes`` that really split something (more than one part), in canonical order."""
        wanted = set(axes)
        return tuple(name for name in AXES if name in wanted and self.shape[name] > 1)

    def describe(self) -> str:
        """The grid as users write it, for example ``n=2,h=2``."""
        return ",".join(f"{k}={v}" for k, v in self.shape.items() if v != 1) or "n=1"

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Arrangement) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()}, {self.size} ranks)"


def parse_grid(text: str) -> dict[str, int]:
    """Extents from their written form: ``"n=2,h=2"`` gives ``{"n": 2, "h": 2}``.

    Raises
    ------
    GridError
        If ``text`` is not a comma-separated list of ``axis=parts``.

    Examples
    --------
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
