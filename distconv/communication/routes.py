r"""Routes: which boxes of a tensor a rank sends to which ranks, and receives from which. No MPI.

A layout gives the indices that each rank of an arrangement has. What moves from one layout to another are intersections
of boxes. They are found for each dimension by itself, so the cost grows with the number of neighbours and not with the
square of the number of ranks. :mod:`.transfer` sends the messages; the performance model only counts them.

Terms:

- source, target: a rank of the layout ``src`` or ``dst``. Over one group of ranks each rank is both.
- destination: a tensor that a target receives into: its block under ``dst``, or with ``ghosts`` one of its slabs.
- compact storage: a block with several ranges of indices in a dimension stores them one after another, without gaps.

Source: Dryden et al. 2019, III-A (halo: indices needed minus indices owned) and III-C (shuffle: each rank sends
I^(p)(D_i) \ I^(p)(D_j) and receives I^(p)(D_j) \ I^(p)(D_i)).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from distconv.arrangement import Arrangement
from distconv.deprecation import former_names
from distconv.distribution import Box, Distribution, Interval
from distconv.errors import DistributionError

if TYPE_CHECKING:
    from distconv.grid import ProcessGrid


class IndexLayout(Hashable, Protocol):
    """The indices that each rank has of a tensor. :class:`Distribution` and :class:`Needs` are layouts."""

    @property
    def grid(self) -> Arrangement:
        """The arrangement of the ranks."""

    @property
    def split(self) -> tuple[str | None, ...]:
        """Grid axis that each dimension is split over, or None."""

    def intervals(self, dim: int, index: int, extent: int) -> tuple[Interval, ...]:
        """Return the global indices that a coordinate has of a dimension.

        Parameters
        ----------
        dim : int
            The dimension.
        index : int
            Coordinate along the axis that the dimension is split over; 0 if it is not split.
        extent : int
            Global size of the dimension.

        Returns
        -------
        tuple of Interval
            In ascending order and disjoint.
        """


@dataclass(frozen=True)
class Needs:
    """The indices that each rank needs of a tensor: for each split dimension one interval for each coordinate.

    The intervals of different ranks may overlap (halos), leave out indices (stride) and be empty.
    """

    base: Distribution
    """The distribution of the tensor: who owns what."""
    needed: tuple[tuple[int, tuple[Interval, ...]], ...]
    """Pairs of a dimension and the needed interval of each coordinate along its axis."""

    @property
    def grid(self) -> ProcessGrid:
        """The grid of ``base``."""
        return self.base.grid

    @property
    def split(self) -> tuple[str | None, ...]:
        """Grid axis that each dimension is split over, as in ``base``."""
        return self.base.split

    def intervals(self, dim: int, index: int, extent: int) -> tuple[Interval, ...]:
        """Return the indices that a coordinate needs: those it owns, unless ``needed`` has the dimension.

        As in :meth:`IndexLayout.intervals`.

        Parameters
        ----------
        dim : int
            Dimension of the tensor.
        index : int
            Coordinate along the axis that splits it.
        extent : int
            Global size of the dimension.

        Returns
        -------
        tuple of Interval
        """
        for needed, per_coordinate in self.needed:
            if needed == dim:
                return (per_coordinate[index].intersect(Interval(0, extent)),)
        return self.base.intervals(dim, index, extent)

    def box(self, shape: Sequence[int]) -> Box:
        """Return the box of global indices that this rank needs.

        Parameters
        ----------
        shape : sequence of int
            Global shape of the tensor.

        Returns
        -------
        Box
        """
        boxes = (self.intervals(d, self.base.coordinate(d), n) for d, n in enumerate(shape))
        return tuple(ranges[0] for ranges in boxes)


class _Segment(NamedTuple):
    """Consecutive indices of one dimension that a source has and a target needs."""

    start: int
    """Global index of the first."""
    extent: int
    src: int
    """Offset in the compact storage of the source."""
    dst: int
    """Offset in the compact storage of the target."""


class TransferBox(NamedTuple):
    """A box that moves from a source to a target."""

    src: tuple[slice, ...]
    """The box in the sender's block."""
    dst: tuple[slice, ...]
    """The box in the receiver's tensor number ``destination``."""
    destination: int
    """Index in the receiver's ``destinations``."""
    extents: tuple[int, ...]
    """Shape of the box."""


class Peer(NamedTuple):
    """All boxes that move between this rank and another one, in the same order on both."""

    rank: int
    boxes: tuple[TransferBox, ...]
    numel: int
    """Number of elements of all boxes."""


def _intersect(src: Sequence[Interval], dst: Sequence[Interval]) -> list[_Segment]:
    """Return the intersections of two ascending lists of intervals."""
    segments = []
    src_offset = 0
    for s in src:
        dst_offset = 0
        for d in dst:
            both = s.intersect(d)
            if both.extent:
                segments.append(
                    _Segment(
                        both.start, both.extent, src_offset + both.start - s.start, dst_offset + both.start - d.start
                    )
                )
            dst_offset += d.extent
        src_offset += s.extent
    return segments


class Routes:
    """The boxes that one rank sends and receives when a tensor moves from one layout to another.

    A target receives each index from one source. Of several sources that hold replicas, this is the one that has the
    coordinates of the target's preferred source along the axes over which ``src`` is replicated:

    - over one group of ranks each target is its own preferred source, so it sends to itself whatever it has;
    - over two groups, target t prefers source t modulo the number of sources.

    Parameters
    ----------
    src, dst : IndexLayout
        Who owns what, and who needs what: over the same ranks, or over two groups, which may share some.
    shape : sequence of int
        Global shape of the tensor.
    rank : int
        This rank, in a numbering that all ranks share. Peers are given in the same numbering.
    sources, targets : sequence of int, optional
        The ranks of ``src.grid`` and of ``dst.grid`` in that numbering. By default ``sources`` are 0, 1, ... and
        ``targets`` are the sources.
    ghosts : bool
        Move only what a rank needs and does not own, into one tensor for each slab (see ``_slabs``). Otherwise each
        target gets its block under ``dst``.

    Attributes
    ----------
    sends, receives : tuple of Peer
        Boxes to and from other ranks, sorted by rank.
    own : tuple of TransferBox
        Boxes that this rank copies from its own block; empty with ``ghosts``.
    destinations : tuple of Box
        The global boxes of the tensors that this rank receives into. Of compact storage with several ranges, indices
        from 0.
    destination_shapes : tuple of tuple of int
        Their shapes.
    local_shape : tuple of int
        The shape of this rank's block under ``src``.

    Raises
    ------
    DistributionError
        If the layouts are over other ranks than given, or do not fit the shape.
    """

    def __init__(
        self,
        src: IndexLayout,
        dst: IndexLayout,
        shape: Sequence[int],
        rank: int,
        *,
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
        ghosts: bool = False,
    ) -> None:
        self.src, self.dst, self.shape, self.ghosts, self.rank = src, dst, tuple(shape), ghosts, rank
        self.sources = range(src.grid.size) if sources is None else sources
        self.targets = self.sources if targets is None else targets
        for grid, ranks in ((src.grid, self.sources), (dst.grid, self.targets)):
            if grid.size != len(ranks):
                raise DistributionError(
                    f"cannot move a tensor between {src.grid} and {dst.grid}: not the same ranks; "
                    f"{grid.describe()} has {grid.size}, {len(ranks)} are given"
                )
        if len(src.split) != len(shape) or len(dst.split) != len(shape):
            raise DistributionError(f"layouts {src} and {dst} do not fit the shape {self.shape}")
        self._source = self.sources.index(rank) if rank in self.sources else None
        self._target = self.targets.index(rank) if rank in self.targets else None
        self._owned = self._intervals(src, self._source)
        self._needed = self._intervals(dst, self._target)
        self.local_shape = tuple(sum(i.extent for i in ranges) for ranges in self._owned)
        self.destinations = self._find_destinations()
        self.destination_shapes = tuple(tuple(i.extent for i in box) for box in self.destinations)
        self.receives, own = self._separate_own(self._find_receives())
        self.sends, _ = self._separate_own(self._find_sends())
        # With ghosts, the owned block is used where it is.
        self.own: tuple[TransferBox, ...] = () if ghosts else own

    def _intervals(self, layout: IndexLayout, index: int | None) -> tuple[tuple[Interval, ...], ...]:
        """Return the indices of rank ``index`` of a layout, for each dimension; an empty tuple for None."""
        if index is None:
            return ()
        return tuple(
            layout.intervals(dim, layout.grid.coordinate(axis, index) if axis else 0, extent)
            for dim, (axis, extent) in enumerate(zip(layout.split, self.shape, strict=True))
        )

    def _find_destinations(self) -> tuple[Box, ...]:
        """Return the boxes of the tensors that this rank receives into."""
        if self._target is None:
            return ()
        if self.ghosts:
            return self._slabs()
        # Several ranges are stored one after another: the "box" has their total size and starts at 0.
        box = (r[0] if len(r) == 1 else Interval(0, sum(i.extent for i in r)) for r in self._needed)
        return (tuple(box),)

    def _slabs(self) -> tuple[Box, ...]:
        """Return the needed box minus the owned one, as two slabs for each split dimension.

        ::

            +-----------------+
            |    low  (dim h) |     A slab of dimension m spans the owned indices of the dimensions before m and
            +----+-------+----+     all needed indices of those after m. So corners belong to the slabs of the
            | low|  own  |high|     earlier dimension, each ghost index is in one slab, and all that comes from
            +----+-------+----+     one owner is in one slab.
            |   high  (dim h) |
            +-----------------+
        """
        need = [ranges[0] for ranges in self._needed]
        # Compact storage with several ranges has no ghosts. A rank with an empty block has no range at all.
        own = [ranges[0] if ranges else Interval(0, 0) for ranges in self._owned]
        core = [n.intersect(o) for n, o in zip(need, own, strict=True)]
        slabs = []
        for dim, axis in enumerate(self.src.split):
            if axis is None:
                continue
            # Clamped: if the owned block lies outside the needed range, one side is all of it and the other one is
            # empty.
            low = Interval(need[dim].start, max(need[dim].start, min(own[dim].start, need[dim].stop)))
            high = Interval(max(low.stop, own[dim].stop), need[dim].stop)
            for side in (low, high):
                box = (*core[:dim], side, *need[dim + 1 :])
                if all(i.extent for i in box):
                    slabs.append(box)
        return tuple(slabs)

    def _preferred_source(self, target: int) -> int:
        """Return the source whose replica a target receives from, where it has a choice."""
        # Over one group a rank prefers itself: an index that it has is copied, and never sent.
        return target if self.sources == self.targets else target % len(self.sources)

    def _replica_coordinates(self, source: int) -> dict[str, int]:
        """Return the coordinates of a source along the axes over which ``src`` is replicated."""
        grid = self.src.grid
        replicated = (axis for axis, parts in grid.shape.items() if parts > 1 and axis not in self.src.split)
        return {axis: grid.coordinate(axis, source) for axis in replicated}

    def _find_receives(self) -> list[Peer]:
        """Return the peers that this rank receives from, itself included."""
        if self._target is None:
            return []
        axes = self.src.split
        # Coordinates along the axes that split the tensor follow from the overlap, the others from the preferred
        # source.
        replica = self._replica_coordinates(self._preferred_source(self._target))
        peers = []
        for coords, segments in self._overlaps(self.src, axes, self._needed):
            rank = self.sources[self.src.grid.rank_of({**replica, **coords})]
            peers.append(self._peer(rank, segments, receiving=True))
        return sorted(peers)

    def _find_sends(self) -> list[Peer]:
        """Return the peers that receive from this rank, itself included."""
        if self._source is None:
            return []
        axes, grid, mine = self.dst.split, self.dst.grid, self._replica_coordinates(self._source)
        # Targets that differ only along these need the same; each gets it from the replica of its preferred source.
        free = [axis for axis in grid.shape if axis not in axes]
        peers = []
        for coords, segments in self._overlaps(self.dst, axes, self._owned):
            for rest in itertools.product(*(range(grid.shape[axis]) for axis in free)):
                target = grid.rank_of({**coords, **dict(zip(free, rest, strict=True))})
                # Without replicas there is one source for each index. The comparison of every target would cost time
                # only.
                if not mine or self._replica_coordinates(self._preferred_source(target)) == mine:
                    peers.append(self._peer(self.targets[target], segments, receiving=False))
        # Sorted: an accumulation receives from these peers and adds in this order, which determines its roundoff error.
        return sorted(peers)

    def _overlaps(
        self, other: IndexLayout, axes: Sequence[str | None], mine: Sequence[Sequence[Interval]]
    ) -> Iterator[tuple[Mapping[str, int], list[list[_Segment]]]]:
        """Yield the coordinates in ``other`` that overlap with ``mine``, and the segments of each dimension."""
        # The grid axes that split different dimensions are different, so each combination of coordinates is another
        # rank.
        tables = [self._overlap_table(other, dim, ranges) for dim, ranges in enumerate(mine)]
        for choice in itertools.product(*(table.items() for table in tables)):
            coords = {axis: index for axis, (index, _) in zip(axes, choice, strict=True) if axis}
            yield coords, [segments for _, segments in choice]

    def _overlap_table(self, other: IndexLayout, dim: int, mine: Sequence[Interval]) -> dict[int, list[_Segment]]:
        """Return the segments that each coordinate of ``other`` shares with ``mine`` in ``dim``, if there are any."""
        axis, extent = other.split[dim], self.shape[dim]
        table = {}
        for index in range(other.grid.shape[axis] if axis else 1):
            theirs = other.intervals(dim, index, extent)
            # The sender's ranges come first on both sides: a segment has its offset in the source before that in the
            # target.
            segments = _intersect(theirs, mine) if other is self.src else _intersect(mine, theirs)
            if segments:
                table[index] = segments
        return table

    def _peer(self, rank: int, per_dim: list[list[_Segment]], *, receiving: bool) -> Peer:
        boxes = []
        # Both ranks find the same segments in the same order. A message is only values, without a list of its boxes.
        for segments in itertools.product(*per_dim):
            src = tuple(slice(s.src, s.src + s.extent) for s in segments)
            # The sender has no use for the destination, and does not know the receiver's slabs.
            if self.ghosts and receiving and rank != self.rank:
                corner = [s.start for s in segments]
                # The slabs are disjoint, and a box is in one of them: the slab that has its first index.
                has_corner = [
                    all(i.start <= at < i.stop for i, at in zip(slab, corner, strict=True))
                    for slab in self.destinations
                ]
                destination = has_corner.index(True)
                offsets = [at - i.start for at, i in zip(corner, self.destinations[destination], strict=True)]
            else:
                destination, offsets = 0, [s.dst for s in segments]
            dst = tuple(slice(o, o + s.extent) for o, s in zip(offsets, segments, strict=True))
            boxes.append(TransferBox(src, dst, destination, tuple(s.extent for s in segments)))
        return Peer(rank, tuple(boxes), sum(math.prod(box.extents) for box in boxes))

    def _separate_own(self, peers: list[Peer]) -> tuple[tuple[Peer, ...], tuple[TransferBox, ...]]:
        others = tuple(peer for peer in peers if peer.rank != self.rank)
        own = tuple(box for peer in peers if peer.rank == self.rank for box in peer.boxes)
        return others, own


__getattr__ = former_names(__name__, {"Layout": "IndexLayout"})
