"""Arrangements: the coordinates of ranks along named axes.

Pure arithmetic: this module sends no message. :class:`distconv.grid.ProcessGrid` adds a communicator. The performance
model and the planner use arrangements of ranks that do not exist.
"""

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
"""Names of the axes: samples, channels, depth, height, width, and replicas."""

SLOWEST_FIRST = ("r", "n", "d", "h", "w", "c")
"""Order in which ranks are numbered. Neighbours along ``c``, then along the spatial axes, usually share a node."""


class Arrangement:
    """Ranks along named axes, without a communicator.

    Arrangements are immutable. Two arrangements are equal if their shapes are.

    Parameters
    ----------
    **axes : int
        Number of parts along each axis; an axis that is left out has one part.

    Attributes
    ----------
    shape : dict of str to int
        Number of parts along every axis of ``AXES``.
    size : int
        Number of ranks, which is the product of the parts.

    Raises
    ------
    GridError
        If an axis is unknown or a number of parts is not a positive integer.

    Examples
    --------
    >>> Arrangement(n=2, h=2).coords_of(3)["h"], Arrangement(n=2, h=2).stride("n")
    (1, 2)
    """

    def __init__(self, **axes: int) -> None:
        for name, parts in axes.items():
            if name not in AXES:
                raise GridError(f"process grid: unknown axis {name!r}; the axes are {', '.join(AXES)}")
            # True is an int, too.
            if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
                raise GridError(f"process grid: {name}={parts!r} must be a positive number of parts")
        self.shape = {name: axes.get(name, 1) for name in AXES}
        self.size = math.prod(self.shape.values())
        self._strides: dict[str, int] = {}
        stride = 1
        # The last name varies fastest.
        for name in reversed(SLOWEST_FIRST):
            self._strides[name] = stride
            stride *= self.shape[name]

    @cached_property
    def key(self) -> Any:
        """Value that is equal for equal arrangements."""
        return tuple(self.shape.values())

    @property
    def coords(self) -> dict[str, int]:
        """Coordinates of this rank. Only a process grid has them.

        Raises
        ------
        GridError
            Always, as an arrangement does not contain this rank.
        """
        raise GridError(f"{self!r} has no communicator. Pass the rank as an argument.")

    def stride(self, axis: str) -> int:
        """Return the difference between the rank numbers of neighbours along ``axis``.

        Parameters
        ----------
        axis : str
            Letter of a grid axis.

        Returns
        -------
        int
        """
        return self._strides[axis]

    def coordinate(self, axis: str, rank: Ranks) -> Ranks:
        """Return the coordinate of a rank along an axis.

        Parameters
        ----------
        axis : str
            Letter of a grid axis.
        rank : int or ndarray of int64
            The rank, or an array of ranks.

        Returns
        -------
        int or ndarray of int64
            The coordinate, in the shape of ``rank``.
        """
        return rank // self._strides[axis] % self.shape[axis]

    def coords_of(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` along every axis.

        Parameters
        ----------
        rank : int
            Rank in the communicator of the grid.

        Returns
        -------
        dict of str to int
        """
        return {name: self.coordinate(name, rank) for name in AXES}

    def rank_of(self, coords: Mapping[str, int]) -> int:
        """Return the rank at ``coords``; the coordinate along axes that are left out is 0.

        Parameters
        ----------
        coords : mapping of str to int
            Coordinates by letter of the axis.

        Returns
        -------
        int
        """
        return sum(index * self._strides[name] for name, index in coords.items())

    def split_axes(self, axes: Iterable[str | None]) -> tuple[str, ...]:
        """Return the members of ``axes`` that have more than one part, in the order of ``AXES``.

        Parameters
        ----------
        axes : iterable of str or None
            Letters of axes; None stands for no axis.

        Returns
        -------
        tuple of str
        """
        wanted = set(axes)
        return tuple(name for name in AXES if name in wanted and self.shape[name] > 1)

    def describe(self) -> str:
        """Return the shape as users write it, such as ``n=2,h=2``."""
        return ",".join(f"{k}={v}" for k, v in self.shape.items() if v != 1) or "n=1"

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Arrangement) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()}, {self.size} ranks)"


def parse_grid(text: str) -> dict[str, int]:
    """Parse the shape of a process grid.

    Parameters
    ----------
    text : str
        A comma-separated list of ``axis=parts``, such as ``"n=2,h=2"``. The axes are ``n``, ``c``, ``d``, ``h``, ``w``
        and ``r``. Spaces are ignored.

    Returns
    -------
    dict of str to int
        Number of parts along each axis, for ``ProcessGrid(**parse_grid(text))``.

    Raises
    ------
    GridError
        If an item is not ``axis=parts``, an axis is unknown or repeated, or a number of parts is not positive.

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
