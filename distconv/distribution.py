"""Distributions: which rank owns which indices of a tensor. Pure arithmetic: this module sends no message.

A distribution D = (D^(0), ..., D^(M-1)) assigns the indices of each dimension to the coordinates of one grid axis, or
replicates the dimension: then every rank has all of its indices. Terms used everywhere in distconv:

- *interval*: a half-open range of global indices of one dimension;
- *box*: one interval for each dimension (a hyperslab);
- *block*: the part of a tensor that one rank owns.

Source: Dryden et al. 2019, II-C (FLAME notation).
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
    """A half-open range ``[start, stop)`` of global indices of one dimension.

    Parameters
    ----------
    start : int
        First index.
    stop : int
        Index after the last one. The interval is empty if ``stop <= start``.
    """

    start: int
    stop: int

    @property
    def extent(self) -> int:
        """Number of indices, never negative."""
        return max(0, self.stop - self.start)

    def intersect(self, other: Interval) -> Interval:
        """Return the indices that both intervals contain.

        Parameters
        ----------
        other : Interval
            Interval of the same dimension.

        Returns
        -------
        Interval
            The common indices; an interval of extent 0 if there are none.
        """
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))


Box = tuple[Interval, ...]
"""One interval per dimension."""


@dataclass(frozen=True)
class Region:
    """A box of one of several tensors, as a part of a message (``distconv.communication.packing``).

    Parameters
    ----------
    tensor : int
        Number of the tensor.
    first : tuple of int
        First index in each dimension.
    extents : tuple of int
        Size in each dimension.
    """

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
    """Return ``box`` as slices of the local tensor that holds ``block``; both are in global indices.

    Parameters
    ----------
    box : Box
        Box inside ``block``.
    block : Box
        Box of the local tensor.

    Returns
    -------
    tuple of slice

    Examples
    --------
    >>> slices_within((Interval(3, 5),), (Interval(2, 6),))
    (slice(1, 3, None),)
    """
    return tuple(
        slice(inner.start - outer.start, inner.stop - outer.start) for inner, outer in zip(box, block, strict=True)
    )


def count_shared_elements(one: Indices, two: Indices) -> Indices:
    """Count the elements that two boxes have in common, for many pairs of boxes at once.

    Parameters
    ----------
    one, two : ndarray of int64, shape (dimensions, 2, ...)
        Starts and stops of the boxes. The trailing dimensions broadcast.

    Returns
    -------
    ndarray of int64, shape (...)
        Number of common elements of each pair.

    Examples
    --------
    >>> count_shared_elements(np.array([[0, 4]]), np.array([[3, 9]]))
    array(1)
    """
    extents = np.minimum(one[:, 1], two[:, 1]) - np.maximum(one[:, 0], two[:, 0])
    return np.asarray(np.prod(np.maximum(extents, 0), axis=0))


def block_range(extent: int, parts: int, index: int) -> range:
    """Return the global indices of one block of a dimension in balanced blocks.

    The lengths of blocks differ by at most one, and the longer blocks come first. If there are more parts than indices,
    the last blocks are empty.

    Parameters
    ----------
    extent : int
        Size of the dimension.
    parts : int
        Number of blocks.
    index : int
        Number of the block, from 0.

    Returns
    -------
    range
        The indices that block ``index`` owns.

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
    """The assignment of the dimensions of a tensor to the axes of a process grid.

    Distributions are immutable and hashable. A distribution does not depend on the shape of the tensor, unless it has
    boundaries. Blocks are balanced (:func:`block_range`) except along the axes of ``boundaries`` and ``cyclic``,
    which are called irregular. Grid axes that split no dimension hold replicas. Axes of one part count as ``None`` in
    comparisons.

    Parameters
    ----------
    grid : ProcessGrid or Arrangement
        The ranks. With an arrangement, which has no communicator, methods require a ``rank``.
    axes : sequence of str or None
        For each dimension, the grid axis that splits it, or ``None`` if every rank has all of its indices.
    boundaries : mapping of str to sequence of int, optional
        Block boundaries b of an axis: its block i owns the indices ``[b[i], b[i+1])``.
    cyclic : mapping of str to int, optional
        Block size of an axis whose blocks are assigned round-robin (block-cyclic). Size 1 is FLAME's elemental
        distribution.

    Attributes
    ----------
    split : tuple of str or None
        As ``axes``, with ``None`` for axes of one part.
    split_axes : tuple of str
        The axes of ``split``, in the order of ``arrangement.AXES``.

    Raises
    ------
    DistributionError
        If an axis is unknown or splits two dimensions, or boundaries or block sizes do not fit the axis.

    Examples
    --------
    >>> from distconv.arrangement import Arrangement
    >>> Distribution(Arrangement(n=2, h=2), ("n", None, "h", None)).local_shape((4, 3, 8, 8), rank=0)
    (2, 3, 4, 8)
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
        # Axes of one part split nothing. Distributions that differ only in them are equal, and nothing is sent between
        # them.
        self._key = (grid.key, self.split, irregular)
        self._hash = hash(self._key)

    def _check(self) -> None:
        named = [axis for axis in self.axes if axis is not None]
        for axis in named:
            if axis not in self.grid.shape:
                raise DistributionError(f"distribution {self.axes}: there is no grid axis {axis!r}")
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
                    f"distribution {self.axes}: boundaries {bounds} of axis {axis!r} must be {(parts or 0) + 1} "
                    "increasing numbers from 0"
                )
        for axis, size in self.cyclic.items():
            if axis not in named or size < 1:
                raise DistributionError(f"distribution {self.axes}: block size {size} for axis {axis!r}")

    # -- index sets -------------------------------------------------------------------------------------------------

    def intervals(self, dim: int, index: int, extent: int) -> tuple[Interval, ...]:
        """Return the indices of one dimension that belong to one coordinate: I_m^(p)(D^(m)) in the paper.

        Parameters
        ----------
        dim : int
            The dimension.
        index : int
            Coordinate along the axis that splits the dimension; ignored if none does.
        extent : int
            Global size of the dimension.

        Returns
        -------
        tuple of Interval
            Disjoint intervals in ascending order. One interval, unless the dimension is block-cyclic.

        Raises
        ------
        DistributionError
            If the boundaries do not cover ``extent`` indices.
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
            # Not checked earlier, since a distribution is made without the shape of a tensor.
            if bounds[-1] != extent:
                raise DistributionError(
                    f"boundaries {bounds} of axis {axis!r} cover {bounds[-1]} indices, not {extent}"
                )
            return (Interval(bounds[index], bounds[index + 1]),)
        block = block_range(extent, parts, index)
        return (Interval(block.start, block.stop),)

    def coordinate(self, dim: int, rank: int | None = None) -> int:
        """Return the coordinate of a rank along the axis that splits ``dim``.

        Parameters
        ----------
        dim : int
            Dimension of the tensor.
        rank : int, optional
            The rank (default: this rank).

        Returns
        -------
        int
            The coordinate; 0 if the dimension is not split.
        """
        axis = self.split[dim]
        if axis is None:
            return 0
        return self.grid.coords[axis] if rank is None else self.grid.coordinate(axis, rank)

    def box(self, rank: int | None, shape: Sequence[int]) -> Box:
        """Return the box that a rank owns.

        Parameters
        ----------
        rank : int or None
            The rank; ``None`` is this rank.
        shape : sequence of int
            Global shape of the tensor.

        Returns
        -------
        tuple of Interval
            One interval for each dimension.

        Raises
        ------
        DistributionError
            If the rank owns several separate intervals of a dimension (block-cyclic), or ``shape`` has a different
            number of dimensions.
        """
        box = []
        for dim, ranges in enumerate(self._owned(rank, shape)):
            if len(ranges) > 1:
                raise DistributionError(
                    f"{self}: dimension {dim} is block-cyclic, use intervals(); it is not one range"
                )
            # A rank without a cyclic block has an empty range, after the last index.
            box.append(ranges[0] if ranges else Interval(shape[dim], shape[dim]))
        return tuple(box)

    def local_shape(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of the block that a rank owns.

        Parameters
        ----------
        shape : sequence of int
            Global shape of the tensor.
        rank : int, optional
            The rank (default: this rank).

        Returns
        -------
        tuple of int
            The local shape.

        Raises
        ------
        DistributionError
            If ``shape`` has a different number of dimensions.
        """
        return tuple(sum(i.extent for i in ranges) for ranges in self._owned(rank, shape))

    def _owned(self, rank: int | None, shape: Sequence[int]) -> list[tuple[Interval, ...]]:
        if len(shape) != len(self.axes):
            raise DistributionError(
                f"{self} has {len(self.axes)} dimensions but the shape {tuple(shape)} has {len(shape)}"
            )
        return [self.intervals(dim, self.coordinate(dim, rank), extent) for dim, extent in enumerate(shape)]

    def owners(self, index: Sequence[int], shape: Sequence[int]) -> list[int]:
        """Return the ranks that own an element.

        Parameters
        ----------
        index : sequence of int
            Global index of the element.
        shape : sequence of int
            Global shape of the tensor.

        Returns
        -------
        list of int
            All ranks that hold the element, in ascending order; several if the tensor is replicated along an axis.

        Raises
        ------
        DistributionError
            If ``index`` is outside ``shape``.
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
        # An empty block starts where the next one does. The last block with this start has the index.
        return bisect_right(starts, i) - 1

    def same_indices(self, dims: Sequence[int], rank: int | None = None) -> list[int]:
        """Return the ranks that own the same indices as a rank in some dimensions: P^(p)(D^(m0), ...) in the paper.

        Parameters
        ----------
        dims : sequence of int
            The dimensions to compare.
        rank : int, optional
            The rank (default: this rank).

        Returns
        -------
        list of int
            The ranks, in ascending order.
        """
        coords = self.grid.coords if rank is None else self.grid.coords_of(rank)
        return self._ranks_at({axis: coords[axis] for axis in (self.split[dim] for dim in dims) if axis is not None})

    def _ranks_at(self, fixed: Mapping[str, int]) -> list[int]:
        free = [axis for axis in self.grid.shape if axis not in fixed]
        choices = itertools.product(*(range(self.grid.shape[axis]) for axis in free))
        return sorted(self.grid.rank_of({**fixed, **dict(zip(free, choice, strict=True))}) for choice in choices)

    # -- derived distributions --------------------------------------------------------------------------------------

    def with_axes(self, axes: Sequence[str | None], *, keep_irregular: bool = True) -> Distribution[Grid_co]:
        """Return a distribution over the same grid with other axes.

        Parameters
        ----------
        axes : sequence of str or None
            As in :class:`Distribution`.
        keep_irregular : bool
            Keep the boundaries and block sizes of axes that are in ``axes``, too. Otherwise all blocks are balanced.

        Returns
        -------
        Distribution
        """
        if not keep_irregular or not (self.boundaries or self.cyclic):
            return Distribution(self.grid, axes)
        # An axis that splits nothing any more must not have boundaries.
        kept = set(axes)
        return Distribution(
            self.grid,
            axes,
            boundaries={a: b for a, b in self.boundaries.items() if a in kept},
            cyclic={a: b for a, b in self.cyclic.items() if a in kept},
        )

    def without(self, axes: Collection[str]) -> Distribution[Grid_co]:
        """Return the distribution that is replicated along the grid axes ``axes``.

        Parameters
        ----------
        axes : collection of str
            Letters of grid axes.

        Returns
        -------
        Distribution[Grid_co]
        """
        return self.with_axes([None if axis in axes else axis for axis in self.axes])

    def replicate(self, dims: Sequence[int] | None = None) -> Distribution[Grid_co]:
        """Return the distribution in which every rank has all indices of some dimensions.

        Parameters
        ----------
        dims : sequence of int, optional
            The dimensions (default: all).

        Returns
        -------
        Distribution
        """
        chosen = range(len(self.axes)) if dims is None else dims
        return self.with_axes([None if dim in chosen else axis for dim, axis in enumerate(self.axes)])

    def transposed(self, dims: Sequence[int], shape: Sequence[int]) -> Distribution[Grid_co]:
        """Return a distribution in which ``dims`` are not split, for operators that need complete lines along them.

        An axis that splits one of ``dims`` moves to the longest other dimension that is not split, if this has an index
        for each part. Otherwise the axis holds replicas, and its ranks compute the same lines.

        Parameters
        ----------
        dims : sequence of int
            Dimensions that every rank needs completely.
        shape : sequence of int
            Global shape of the tensor.

        Returns
        -------
        Distribution
            Axes that move have balanced blocks.

        Notes
        -----
        Source: the pencils of distributed Fourier transforms, e.g. Dalcin, Mortensen, Keyes 2019, section 2.
        """
        axes = [None if d in dims else axis for d, axis in enumerate(self.split)]
        stay = {axis for axis in axes if axis is not None}
        for axis in filter(None, (self.split[d] for d in dims)):
            free = [d for d, taken in enumerate(axes) if taken is None and d not in dims]
            # Of several longest ones the first, so that all ranks choose the same.
            longest = max(free, key=lambda d: shape[d], default=None)
            # A dimension with fewer indices than parts would leave ranks without a line.
            if longest is not None and shape[longest] >= self.grid.shape[axis]:
                axes[longest] = axis
        # An axis that has moved to another dimension gets balanced blocks: its boundaries fit the old one only.
        boundaries = {axis: bounds for axis, bounds in self.boundaries.items() if axis in stay}
        cyclic = {axis: size for axis, size in self.cyclic.items() if axis in stay}
        return Distribution(self.grid, axes, boundaries=boundaries, cyclic=cyclic)

    def balanced(self) -> Distribution[Grid_co]:
        """Return the distribution with the same axes and balanced blocks."""
        return Distribution(self.grid, self.axes) if self.boundaries or self.cyclic else self

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Distribution) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *_: Any, **named: Any) -> NoReturn:
        """Raise an error, because ``x.dist(y)`` of a DistTensor is not the distance ``torch.dist(x, y)``.

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
    """Return the grid axis that splits each dimension of a tensor.

    Parameters
    ----------
    dims : str or sequence of str or None, optional
        The axes, such as ``"nhw"``, or ``"n-hw"`` with ``-`` (or ``None``) for a dimension that is not split. By
        default dimensions are N, NC, NCW, NCHW or NCDHW.
    ndim : int
        Number of dimensions.

    Returns
    -------
    tuple of str or None

    Raises
    ------
    DistributionError
        If ``dims`` names a different number of dimensions, or ``ndim`` has no default.

    Examples
    --------
    >>> default_axes("nhw", 3)
    ('n', 'h', 'w')
    """
    if dims is None:
        if ndim not in _DEFAULT_AXES:
            raise DistributionError(f"a tensor of {ndim} dimensions has no default distribution. Pass dims=.")
        return _DEFAULT_AXES[ndim]
    axes = tuple(None if axis in (None, "-") else axis for axis in dims)
    if len(axes) != ndim:
        raise DistributionError(f"dims {dims!r} names {len(axes)} dimensions but the tensor has {ndim}")
    return axes
