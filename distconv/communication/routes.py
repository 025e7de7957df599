r"""Routes: which boxes of a tensor a rank sends to whom, and receives from whom. Pure arithmetic: nothing is sent here.

A layout says which indices each rank of an arrangement has; what goes from one layout to another are intersections of
boxes. They are found per dimension, so that the cost grows with the neighbours and not with the square of the ranks.

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
from distconv.distribution import Box, Distribution, Interval
from distconv.errors import DistributionError

if TYPE_CHECKING:
    from distconv.grid import ProcessGrid


class Layout(Hashable, Protocol):
    """What the mover asks of a source or destination; :class:`Distribution` and :class:`Needs` are layouts."""

    @property
    def grid(self) -> Arrangement:
        """The arrangement of the ranks."""

    @property
    def split(self) -> tuple[str | None, ...]:
        """Axis that each dimension is split over, or None."""

    def intervals(self, dim: int, index: int, extent: int) -> tuple[Interval, ...]:
        """Global indices of dimension ``dim`` (of ``extent``) that coordinate ``index`` along its axis has."""


@dataclass(frozen=True)
class Needs:
    """What each rank needs of a tensor distributed by ``base``: per split dimension one interval per coordinate.

    Needs of different ranks may overlap (halos), skip indices (stride) and be empty.
    """

    base: Distribution
    needed: tuple[tuple[int, tuple[Interval, ...]], ...]
    """Pairs of a dimension and the needed interval of each coordinate along its axis."""

    @property
    def grid(self) -> ProcessGrid:
        """The grid of ``base``."""
        return self.base.grid

    @property
    def split(self) -> tuple[str | None, ...]:
        """Axis that each dimension is split over, as in ``base``."""
        return self.base.split

    def intervals(self, dim: int, index: int, extent: int) -> tuple[Interval, ...]:
        """What coordinate ``index`` needs of dimension ``dim``: its own, unless ``needed`` says otherwise."""
        for needed, per_coordinate in self.needed:
            if needed == dim:
                return (per_coordinate[index].intersect(Interval(0, extent)),)
        return self.base.intervals(dim, index, extent)

    def box(self, shape: Sequence[int]) -> Box:
        """What this rank needs."""
        boxes = (self.intervals(d, self.base.coordinate(d), n) for d, n in enumerate(shape))
        return tuple(ranges[0] for ranges in boxes)


class _Segment(NamedTuple):
    """A run of indices of one dimension that one coordinate has and another one wants."""

    start: int
    extent: int
    src: int
    dst: int


class Piece(NamedTuple):
    """A box that moves, as slices of the sender's block and of the receiver's part number ``part``."""

    src: tuple[slice, ...]
    dst: tuple[slice, ...]
    part: int
    extents: tuple[int, ...]


class Peer(NamedTuple):
    """All that moves between this rank and another one, in an order that both of them know."""

    rank: int
    pieces: tuple[Piece, ...]
    numel: int


def _segments(src: Sequence[Interval], dst: Sequence[Interval]) -> list[_Segment]:
    """Intersections of two rising lists of intervals, with their offsets in compact local storage."""
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
    """What one rank sends and receives when a tensor of ``shape`` goes from layout ``src`` to layout ``dst``.

    The layouts are over the same ranks, or over two groups: ``sources`` and ``targets`` are then the ranks, in a
    numbering that all share, of ``src.grid`` and ``dst.grid`` in their order, and ``rank`` is one of them in that
    numbering. Peers are named by it.

    A rank receives each index from one owner: of several that hold replicas, from the one that has the coordinates of
    its home along the axes over which ``src`` is replicated. Over the same ranks each is its own home, so that it is
    its own source wherever it can be; target t of another group has source t mod their number as its home. With
    ``ghosts=True`` only what a rank needs and does not own moves, and it arrives as separate slabs, two per split
    dimension (corners belong to the slabs of the earlier dimension).

    Raises
    ------
    DistributionError
        If the layouts are over other ranks than are given, or do not fit the shape.
    """

    def __init__(
        self,
        src: Layout,
        dst: Layout,
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
        self._mine_src = self._intervals(src, self._source)
        self._mine_dst = self._intervals(dst, self._target)
        self.local_shape = tuple(sum(i.extent for i in ranges) for ranges in self._mine_src)
        self.parts = self._parts()
        self.part_shapes = tuple(tuple(i.extent for i in box) for box in self.parts)
        self.receives, kept = self._split_own(self._receives())
        self.sends, _ = self._split_own(self._sends())
        # Ghosts are what others own: the own block is used where it lies.
        self.own: tuple[Piece, ...] = () if ghosts else kept

    def _intervals(self, layout: Layout, index: int | None) -> tuple[tuple[Interval, ...], ...]:
        """What rank ``index`` of a layout has of each dimension; nothing where it is not in it."""
        if index is None:
            return ()
        return tuple(
            layout.intervals(dim, layout.grid.coordinate(axis, index) if axis else 0, extent)
            for dim, (axis, extent) in enumerate(zip(layout.split, self.shape, strict=True))
        )

    def _parts(self) -> tuple[Box, ...]:
        """The boxes that arrive on this rank."""
        if self._target is None:
            return ()
        if self.ghosts:
            return self._slabs()
        # Compact local storage: with several ranges per dimension the "box" is their total extent from 0.
        whole = (r[0] if len(r) == 1 else Interval(0, sum(i.extent for i in r)) for r in self._mine_dst)
        return (tuple(whole),)

    def _slabs(self) -> tuple[Box, ...]:
        """The needed box minus the owned one, cut like an onion.

        +-----------------+
        |    low  (dim h) |     A slab of dimension m spans what is owned of the dimensions before m and all
        +----+-------+----+     that is needed of those after m, so each ghost index is in one slab, and all
        | low|  own  |high|     that comes from one owner is in one slab.
        +----+-------+----+
        |   high  (dim h) |
        +-----------------+
        """
        need = [ranges[0] for ranges in self._mine_dst]
        own = [ranges[0] if ranges else Interval(0, 0) for ranges in self._mine_src]
        core = [n.intersect(o) for n, o in zip(need, own, strict=True)]
        slabs = []
        for dim, axis in enumerate(self.src.split):
            if axis is None:
                continue
            low = Interval(need[dim].start, max(need[dim].start, min(own[dim].start, need[dim].stop)))
            high = Interval(max(low.stop, own[dim].stop), need[dim].stop)
            for side in (low, high):
                box = (*core[:dim], side, *need[dim + 1 :])
                if all(i.extent for i in box):
                    slabs.append(box)
        return tuple(slabs)

    def _home(self, target: int) -> int:
        """The source whose replicas a target takes: itself, if the layouts are over the same ranks."""
        return target if self.sources == self.targets else target % len(self.sources)

    def _replica(self, source: int) -> dict[str, int]:
        """The coordinates of a source along the axes over which ``src`` is replicated."""
        grid = self.src.grid
        replicated = (axis for axis, parts in grid.shape.items() if parts > 1 and axis not in self.src.split)
        return {axis: grid.coordinate(axis, source) for axis in replicated}

    def _receives(self) -> list[Peer]:
        """Peers that this rank receives from, itself included."""
        if self._target is None:
            return []
        axes = self.src.split
        replica = self._replica(self._home(self._target))
        peers = []
        for coords, segments in self._shared(self.src, axes, self._mine_dst):
            rank = self.sources[self.src.grid.rank_of({**replica, **coords})]
            peers.append(self._peer(rank, segments, receiving=True))
        # By rank: shares are added in this order, which decides their roundoff.
        return sorted(peers)

    def _sends(self) -> list[Peer]:
        """Peers that choose this rank as their source, itself included."""
        if self._source is None:
            return []
        axes, grid, mine = self.dst.split, self.dst.grid, self._replica(self._source)
        # Targets that differ along these alone need the same; each takes it from the replica that is its home.
        free = [axis for axis in grid.shape if axis not in axes]
        peers = []
        for coords, segments in self._shared(self.dst, axes, self._mine_src):
            for rest in itertools.product(*(range(grid.shape[axis]) for axis in free)):
                target = grid.rank_of({**coords, **dict(zip(free, rest, strict=True))})
                if not mine or self._replica(self._home(target)) == mine:
                    peers.append(self._peer(self.targets[target], segments, receiving=False))
        return sorted(peers)

    def _shared(
        self, other: Layout, axes: Sequence[str | None], mine: Sequence[Sequence[Interval]]
    ) -> Iterator[tuple[Mapping[str, int], list[list[_Segment]]]]:
        """The coordinates in ``other`` that share something with ``mine``, and what, per dimension."""
        tables = [self._table(other, dim, ranges) for dim, ranges in enumerate(mine)]
        for choice in itertools.product(*(table.items() for table in tables)):
            coords = {axis: index for axis, (index, _) in zip(axes, choice, strict=True) if axis}
            yield coords, [segments for _, segments in choice]

    def _table(self, other: Layout, dim: int, mine: Sequence[Interval]) -> dict[int, list[_Segment]]:
        """Per coordinate of ``other`` what it shares with ``mine`` in ``dim``, if it shares anything."""
        axis, extent = other.split[dim], self.shape[dim]
        table = {}
        for index in range(other.grid.shape[axis] if axis else 1):
            theirs = other.intervals(dim, index, extent)
            segments = _segments(theirs, mine) if other is self.src else _segments(mine, theirs)
            if segments:
                table[index] = segments
        return table

    def _peer(self, rank: int, per_dim: list[list[_Segment]], *, receiving: bool) -> Peer:
        pieces = []
        for segments in itertools.product(*per_dim):
            src = tuple(slice(s.src, s.src + s.extent) for s in segments)
            if self.ghosts and receiving and rank != self.rank:
                part = self._slab_of([s.start for s in segments])
                offsets = [s.start - b.start for s, b in zip(segments, self.parts[part], strict=True)]
            else:
                part, offsets = 0, [s.dst for s in segments]
            dst = tuple(slice(o, o + s.extent) for o, s in zip(offsets, segments, strict=True))
            pieces.append(Piece(src, dst, part, tuple(s.extent for s in segments)))
        return Peer(rank, tuple(pieces), sum(math.prod(p.extents) for p in pieces))

    def _slab_of(self, corner: Sequence[int]) -> int:
        inside = (all(i.start <= at < i.stop for i, at in zip(box, corner, strict=True)) for box in self.parts)
        return list(inside).index(True)

    def _split_own(self, peers: list[Peer]) -> tuple[tuple[Peer, ...], tuple[Piece, ...]]:
        others = tuple(peer for peer in peers if peer.rank != self.rank)
        own = tuple(piece for peer in peers if peer.rank == self.rank for piece in peer.pieces)
        return others, own
