"""Distributions: which rank owns which indices of a tensor. Pure arithmetic, no message is ever sent here.

Source: Dryden et al. 2019, II-C (FLAME notation): D = (D^(0), ..., D^(M-1)) assigns the indices of each dimension to
the coordinates of one grid axis, or all of them to every rank (replicated).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from distconv.arrangement import Arrangement
from distconv.errors import DistributionError, UnsupportedOperation

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from distconv.grid import ProcessGrid

    Grid_co = TypeVar("Grid_co", bound=Arrangement, default=ProcessGrid, covariant=True)
else:
    from typing import TypeVar

    Grid_co = TypeVar("Grid_co")


Indices = npt.NDArray[np.int64]


class Interval(NamedTuple):
    """Half-open range of global indices ``[start, stop)`` of one dimension."""

    start: int
    stop: int

    @property
    def extent(self) -> int:
        """Number of indices, never negative."""
        return max(0, self.stop - self.start)

    def intersect(self, other: Interval) -> Interval:
        """Indices in both; of extent 0 where there are none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))


Box = tuple[Interval, ...]
"""One interval per dimension."""


@dataclass(frozen=True)
class Region:
    """A box of one of several tensors: the tensor's number, the box's first index and its extents."""

    tensor: int
    first: tuple[int, ...]
    extents: tuple[int, ...]

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of its tensor."""
        return tuple(slice(first, first + extent) for first, extent in zip(self.first, self.extents, strict=True))

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.extents)


def slices_within(box: Box, block: Box) -> tuple[slice, ...]:
    """``box`` as slices of the tensor that holds ``block``.

    >>> slices_within((Interval(3, 5),), (Interval(2, 6),))
    (slice(1, 3, None),)
    """
    return tuple(
        slice(inner.start - outer.start, inner.stop - outer.start) for inner, outer in zip(box, block, strict=True)
    )


def shared_elements(one: Indices, two: Indices) -> Indices:
    """Elements that boxes have in common, for many at once: (dimensions, 2, ...) starts and stops of each.

    >>> shared_elements(np.array([[0, 4]]), np.array([[3, 9]]))
    array(1)
    """
    extents = np.minimum(one[:, 1], two[:, 1]) - np.maximum(one[:, 0], two[:, 0])
    return np.asarray(np.prod(np.maximum(extents, 0), axis=0))


def block_range(extent: int, parts: int, index: int) -> range:
    """Global indices that block ``index`` owns when ``extent`` is cut into ``parts``.

    Lengths differ by at most one, and any rank can work out any other rank's block by itself.

    Raises
    ------
    DistributionError
        If ``index`` is not in ``range(parts)``.

    Examples
    --------
    >>> [len(block_range(10, 4, i)) for i in range(4)]
    [3, 3, 2, 2]
    """
    if not 0 <= index < parts:
        raise DistributionError(f"block {index} of {parts}: the index must be in range({parts})")
    length, longer = divmod(extent, parts)
    start = index * length + min(index, longer)
    return range(start, start + length + (index < longer))


class Distribution(Generic[Grid_co]):
    """For each tensor dimension the grid axis it is split over, or ``None`` where every rank has all of it.

    ``grid`` is a process grid, or an arrangement without a communicator: then every method needs a rank.

    Blocks are balanced unless an axis is named in ``boundaries`` (block ``i`` owns ``[b[i], b[i+1])``) or in
    ``cyclic`` (blocks of that many indices dealt out in turn; 1 is the elemental distribution). Immutable and
    hashable; an axis of one part counts as ``None`` in comparisons.

    Raises
    ------
    DistributionError
        If an axis is unknown or used twice, or the boundaries do not fit the axis.
    """

    __slots__ = ("_hash", "_key", "axes", "boundaries", "cyclic", "grid", "split", "split_axes")

    def __init__(
        self,
        grid: Grid_co,
        axes: Sequence[str | None],
        *,
        boundaries: Mapping[str, Sequence[int]] | None = None,
        cyclic: Mapping[str, int] | None = None,
    ) -> None:
        self.grid = grid
        self.axes = tuple(axes)
        self.boundaries = {axis: tuple(b) for axis, b in (boundaries or {}).items()}
        self.cyclic = dict(cyclic or {})
        self._check()
        self.split = tuple(axis if axis is not None and grid.shape[axis] > 1 else None for axis in self.axes)
        """Per dimension the axis that really splits it: of more than one part."""
        self.split_axes = grid.split_axes(self.split)
        """Axes over which the tensor is really split, in canonical order; its other axes hold replicas."""
        irregular = (
            tuple((self.boundaries.get(axis), self.cyclic.get(axis)) if axis else None for axis in self.split)
            if self.boundaries or self.cyclic
            else ()
        )
        self._key = (grid.key, self.split, irregular)
        self._hash = hash(self._key)

    def _check(self) -> None:
        named = [axis for axis in self.axes if axis is not None]
        for axis in named:
            if axis not in self.grid.shape:
                raise DistributionError(f"distribution {self.axes}: no grid axis is called {axis!r}")
        if len(set(named)) != len(named):
            raise DistributionError(f"distribution {self.axes}: a grid axis can split one dimension only")
        for axis, bounds in self.boundaries.items():
            parts = self.grid.shape.get(axis)
            if axis not in named or axis in self.cyclic:
                raise DistributionError(
                    f"distribution {self.axes}: boundaries for {axis!r}, which splits no dimension in blocks"
                )
            if len(bounds) != (parts or 0) + 1 or bounds[0] != 0 or list(bounds) != sorted(bounds):
                raise DistributionError(
                    f"distribution {self.axes}: boundaries {bounds} of axis {axis!r} must be {(parts or 0) + 1} rising "
                    "numbers from 0"
                )
        for axis, size in self.cyclic.items():
            if axis not in named or size < 1:
                raise DistributionError(f"distribution {self.axes}: block size {size} for axis {axis!r}")

    # -- index sets -------------------------------------------------------------------------------------------------

    def intervals(self, dim: int, index: int, extent: int) -> tuple[Interval, ...]:
        """I_m^(p)(D^(m)): what coordinate ``index`` owns of dimension ``dim``, as rising disjoint intervals.

        Raises
        ------
        DistributionError
            If boundaries that were given do not cover the extent.
        """
        axis = self.split[dim]
        if axis is None:
            return (Interval(0, extent),)
        parts = self.grid.shape[axis]
        if axis in self.cyclic:
            size = self.cyclic[axis]
            return tuple(Interval(i, min(i + size, extent)) for i in range(index * size, extent, parts * size))
        if axis in self.boundaries:
            bounds = self.boundaries[axis]
            if bounds[-1] != extent:
                raise DistributionError(
                    f"boundaries {bounds} of axis {axis!r} cover {bounds[-1]} indices, not {extent}"
                )
            return (Interval(bounds[index], bounds[index + 1]),)
        block = block_range(extent, parts, index)
        return (Interval(block.start, block.stop),)

    def coordinate(self, dim: int, rank: int | None = None) -> int:
        """Coordinate of ``rank`` (default: this one) along the axis that splits ``dim``; 0 where none does."""
        axis = self.split[dim]
        if axis is None:
            return 0
        return self.grid.coords[axis] if rank is None else self.grid.coordinate(axis, rank)

    def box(self, rank: int | None, shape: Sequence[int]) -> Box:
        """Half-open global range that ``rank`` (None: this one) owns of each dimension of ``shape``.

        Raises
        ------
        DistributionError
            If the rank owns several separate ranges of a dimension (block-cyclic), or ``shape`` has another number
            of dimensions.
        """
        box = []
        for dim, ranges in enumerate(self._owned(rank, shape)):
            if len(ranges) > 1:
                raise DistributionError(
                    f"{self}: dimension {dim} is block-cyclic, use intervals(); it is not one range"
                )
            box.append(ranges[0] if ranges else Interval(shape[dim], shape[dim]))
        return tuple(box)

    def local_shape(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Shape of the block that ``rank`` (default: this one) owns of a tensor of ``shape``."""
        return tuple(sum(i.extent for i in ranges) for ranges in self._owned(rank, shape))

    def _owned(self, rank: int | None, shape: Sequence[int]) -> list[tuple[Interval, ...]]:
        if len(shape) != len(self.axes):
            raise DistributionError(
                f"{self} has {len(self.axes)} dimensions but the shape {tuple(shape)} has {len(shape)}"
            )
        return [self.intervals(dim, self.coordinate(dim, rank), extent) for dim, extent in enumerate(shape)]

    def owners(self, index: Sequence[int], shape: Sequence[int]) -> list[int]:
        """All ranks that own the element at the global ``index`` of a tensor of ``shape``, rising.

        Raises
        ------
        DistributionError
            If the index is outside the shape.
        """
        coords: dict[str, int] = {}
        for dim, (i, extent) in enumerate(zip(index, shape, strict=True)):
            if not 0 <= i < extent:
                raise DistributionError(f"index {tuple(index)} is outside the shape {tuple(shape)}")
            axis = self.split[dim]
            if axis is not None:
                coords[axis] = self._coordinate_of(dim, axis, i, extent)
        return self._ranks_at(coords)

    def _coordinate_of(self, dim: int, axis: str, i: int, extent: int) -> int:
        parts = self.grid.shape[axis]
        if axis in self.cyclic:
            return i // self.cyclic[axis] % parts
        starts = [self.intervals(dim, k, extent)[0].start for k in range(parts)]
        return bisect_right(starts, i) - 1

    def same_indices(self, dims: Sequence[int], rank: int | None = None) -> list[int]:
        """P^(p)(D^(m0), ...): the ranks with the same indices as ``rank`` (default: this one) in all of ``dims``."""
        coords = self.grid.coords if rank is None else self.grid.coords_of(rank)
        return self._ranks_at({axis: coords[axis] for axis in (self.split[dim] for dim in dims) if axis is not None})

    def _ranks_at(self, fixed: Mapping[str, int]) -> list[int]:
        free = [axis for axis in self.grid.shape if axis not in fixed]
        choices = itertools.product(*(range(self.grid.shape[axis]) for axis in free))
        return sorted(self.grid.rank_of({**fixed, **dict(zip(free, choice, strict=True))}) for choice in choices)

    # -- derived distributions --------------------------------------------------------------------------------------

    def with_axes(self, axes: Sequence[str | None], *, keep_irregular: bool = True) -> Distribution[Grid_co]:
        """Same grid, other axes; irregular blocks stay with the axes that stay (unless told otherwise)."""
        if not keep_irregular or not (self.boundaries or self.cyclic):
            return Distribution(self.grid, axes)
        kept = set(axes)
        return Distribution(
            self.grid,
            axes,
            boundaries={a: b for a, b in self.boundaries.items() if a in kept},
            cyclic={a: b for a, b in self.cyclic.items() if a in kept},
        )

    def without(self, axes: Collection[str]) -> Distribution[Grid_co]:
        """Same grid, whole over ``axes``."""
        return self.with_axes([None if axis in axes else axis for axis in self.axes])

    def replicate(self, dims: Sequence[int] | None = None) -> Distribution[Grid_co]:
        """Same grid, with ``dims`` (default: all) whole on every rank."""
        chosen = range(len(self.axes)) if dims is None else dims
        return self.with_axes([None if dim in chosen else axis for dim, axis in enumerate(self.axes)])

    def transposed(self, dims: Sequence[int], shape: Sequence[int]) -> Distribution[Grid_co]:
        """``dims`` whole: an axis that splits one of them splits another dimension of ``shape`` that is long enough.

        Each rank then has lines along ``dims`` of its own; along an axis for which there is no such dimension, ranks
        have the same lines.

        Source: the pencils of distributed Fourier transforms, e.g. Dalcin, Mortensen, Keyes 2019, section 2.
        """
        axes = [None if d in dims else axis for d, axis in enumerate(self.split)]
        stay = {axis for axis in axes if axis is not None}
        for axis in filter(None, (self.split[d] for d in dims)):
            free = [d for d, taken in enumerate(axes) if taken is None and d not in dims]
            longest = max(free, key=lambda d: shape[d], default=None)
            if longest is not None and shape[longest] >= self.grid.shape[axis]:
                axes[longest] = axis
        boundaries = {axis: bounds for axis, bounds in self.boundaries.items() if axis in stay}
        cyclic = {axis: size for axis, size in self.cyclic.items() if axis in stay}
        return Distribution(self.grid, axes, boundaries=boundaries, cyclic=cyclic)

    def balanced(self) -> Distribution[Grid_co]:
        """Same axes with balanced blocks."""
        return Distribution(self.grid, self.axes) if self.boundaries or self.cyclic else self

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Distribution) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *_: Any, **named: Any) -> NoReturn:
        """Raise: ``x.dist(y)`` of a DistTensor is not the distance ``torch.dist(x, y)``.

        Raises
        ------
        UnsupportedOperation
            Always.
        """
        raise UnsupportedOperation("x.dist(y): x.dist is the distribution of a DistTensor. Call torch.dist(x, y).")

    def __repr__(self) -> str:
        names = ", ".join("-" if axis is None else axis for axis in self.axes)
        extra = "".join(f", {a} at {b}" for a, b in self.boundaries.items())
        extra += "".join(f", {a} cyclic by {b}" for a, b in self.cyclic.items())
        return f"Distribution(({names}) over {self.grid.describe()}{extra})"


_DEFAULT_AXES: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("n",),
    2: ("n", "c"),
    3: ("n", "c", "w"),
    4: ("n", "c", "h", "w"),
    5: ("n", "c", "d", "h", "w"),
}


def default_axes(dims: str | Sequence[str | None] | None, ndim: int) -> tuple[str | None, ...]:
    """Grid axis of each of ``ndim`` dimensions: as ``dims`` says (``"nhw"``, ``"n-hw"``), else N, NC, NCW, NCHW, NCDHW.

    Raises
    ------
    DistributionError
        If ``dims`` names another number of dimensions, or ``ndim`` has no default.

    Examples
    --------
    >>> default_axes("nhw", 3)
    ('n', 'h', 'w')
    """
    if dims is None:
        if ndim not in _DEFAULT_AXES:
            raise DistributionError(f"a tensor of {ndim} dimensions has no default distribution; say dims=")
        return _DEFAULT_AXES[ndim]
    axes = tuple(None if axis in (None, "-") else axis for axis in dims)
    if len(axes) != ndim:
        raise DistributionError(f"dims {dims!r} names {len(axes)} dimensions but the tensor has {ndim}")
    return axes
