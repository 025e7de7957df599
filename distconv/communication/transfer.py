"""The mover: everything that crosses ranks is an intersection of boxes.

A :class:`TransferPlan` moves a tensor from the layout ``src`` (who owns what) to the layout ``dst`` (who needs what).
Redistribution, scatter, gather and halo exchange differ only in their two layouts. Plans are built per dimension, so
that their cost grows with the neighbours and not with the square of the ranks, and cached.

Source: Dryden et al. 2019, III-A (halo: indices needed minus indices owned) and III-C (shuffle: each rank sends
I^(p)(D_i) \\ I^(p)(D_j) and receives I^(p)(D_j) \\ I^(p)(D_i)).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from mpi4py import MPI

from distconv.communication import agreement
from distconv.communication.transport import Exchange, Message
from distconv.distribution import Box, Distribution, Interval
from distconv.errors import DistributionError
from distconv.grid import ProcessGrid


class Layout(Hashable, Protocol):
    """What the mover asks of a source or destination; :class:`Distribution` and :class:`Needs` are layouts."""

    @property
    def grid(self) -> ProcessGrid: ...

    @property
    def split(self) -> tuple[str | None, ...]: ...

    def intervals(self, dim: int, index: int, extent: int) -> tuple[Interval, ...]: ...


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
        return self.base.grid

    @property
    def split(self) -> tuple[str | None, ...]:
        return self.base.split

    def intervals(self, dim: int, index: int, extent: int) -> tuple[Interval, ...]:
        for known, per_coordinate in self.needed:
            if known == dim:
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
    found = []
    src_offset = 0
    for s in src:
        dst_offset = 0
        for d in dst:
            both = s.intersect(d)
            if both.extent:
                found.append(
                    _Segment(
                        both.start, both.extent, src_offset + both.start - s.start, dst_offset + both.start - d.start
                    )
                )
            dst_offset += d.extent
        src_offset += s.extent
    return found


class TransferPlan:
    """Moves a tensor of ``shape`` from layout ``src`` to layout ``dst``; both over the same ranks.

    A rank receives each index from the owner that shares its coordinates on the axes over which ``src`` is replicated,
    so it is its own source wherever it can be. With ``ghosts=True`` only what a rank needs and does not own moves, and
    it arrives as separate slabs, two per split dimension (corners belong to the slabs of the earlier dimension).

    Reversible in two ways: ``start_accumulate`` sends overlapping needs back and adds them up at the owners;
    ``reversed()`` is the redistribution in the other direction, where nothing is added.

    Build it through :func:`transfer_plan`, which caches.

    Raises
    ------
    DistributionError
        If the two sides are not over the same ranks, or a layout does not fit the shape.
    """

    def __init__(self, src: Layout, dst: Layout, shape: Sequence[int], *, ghosts: bool = False) -> None:
        if src.grid.size != dst.grid.size:
            raise DistributionError(f"cannot move a tensor between {src.grid} and {dst.grid}: not the same ranks")
        if len(src.split) != len(shape) or len(dst.split) != len(shape):
            raise DistributionError(f"layouts {src} and {dst} do not fit the shape {tuple(shape)}")
        self.src, self.dst, self.shape, self.ghosts = src, dst, tuple(shape), ghosts
        self.comm: MPI.Intracomm = src.grid.world
        self.rank = src.grid.rank
        self._mine_src = self._own_intervals(src)
        self._mine_dst = self._own_intervals(dst)
        self.local_shape = tuple(sum(i.extent for i in ranges) for ranges in self._mine_src)
        self.parts = self._slabs() if ghosts else (self._mine_dst_box(),)
        self.part_shapes = tuple(tuple(i.extent for i in box) for box in self.parts)
        self.receives, kept = self._split_own(self._receives())
        self.sends, _ = self._split_own(self._sends())
        self.own: tuple[Piece, ...] = () if ghosts else kept

    # -- building ---------------------------------------------------------------------------------------------------

    def _own_intervals(self, layout: Layout) -> tuple[tuple[Interval, ...], ...]:
        coords = layout.grid.coords
        return tuple(
            layout.intervals(dim, coords[axis] if axis else 0, extent)
            for dim, (axis, extent) in enumerate(zip(layout.split, self.shape, strict=True))
        )

    def _mine_dst_box(self) -> Box:
        # Compact local storage: with several ranges per dimension the "box" is their total extent from 0.
        return tuple(
            ranges[0] if len(ranges) == 1 else Interval(0, sum(i.extent for i in ranges)) for ranges in self._mine_dst
        )

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

    def _receives(self) -> list[Peer]:
        """Peers that this rank receives from, itself included."""
        axes = self.src.split
        tables = [self._table(self.src, dim, mine) for dim, mine in enumerate(self._mine_dst)]
        replica = {a: c for a, c in self.src.grid.coords.items() if a not in axes}
        peers = []
        for choice in itertools.product(*(table.items() for table in tables)):
            coords = {axis: index for axis, (index, _) in zip(axes, choice, strict=True) if axis}
            rank = self.src.grid.rank_of({**replica, **coords})
            peers.append(self._peer(rank, [segments for _, segments in choice], receiving=True))
        return sorted(peers)

    def _sends(self) -> list[Peer]:
        """Peers that choose this rank as their source, itself included."""
        axes, grid = self.dst.split, self.dst.grid
        tables = [self._table(self.dst, dim, mine) for dim, mine in enumerate(self._mine_src)]
        free = [axis for axis in grid.shape if axis not in axes]
        replica = [
            (a, c) for a, c in self.src.grid.coords.items() if a not in self.src.split and self.src.grid.shape[a] > 1
        ]
        peers = []
        for choice in itertools.product(*(table.items() for table in tables)):
            coords = {axis: index for axis, (index, _) in zip(axes, choice, strict=True) if axis}
            for rest in itertools.product(*(range(grid.shape[axis]) for axis in free)):
                rank = grid.rank_of({**coords, **dict(zip(free, rest, strict=True))})
                theirs = self.src.grid.coords_of(rank)
                if all(theirs[axis] == index for axis, index in replica):
                    peers.append(self._peer(rank, [segments for _, segments in choice], receiving=False))
        return sorted(peers)

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

    # -- running ----------------------------------------------------------------------------------------------------

    @property
    def silent(self) -> bool:
        """Whether this rank neither sends nor receives."""
        return not self.sends and not self.receives

    def start(self, local: torch.Tensor, what: str = "transfer") -> Transfer:
        """Post all messages from ``local`` (this rank's block of ``src``); ``finish()`` gives the parts."""
        return Transfer(self, local, what)

    def move(self, local: torch.Tensor, what: str = "transfer") -> torch.Tensor:
        """This rank's block of ``dst``, given its block of ``src``."""
        if self.silent and self._keeps_everything():
            return local
        return self.start(local, what).finish()[0]

    def _keeps_everything(self) -> bool:
        return len(self.own) == 1 and self.own[0].extents == self.local_shape == self.part_shapes[0]

    def start_accumulate(
        self, parts: Sequence[torch.Tensor], like: torch.Tensor, what: str = "transfer back"
    ) -> Accumulation:
        """Post the way back: what was received goes to its owner, where ``finish(into)`` adds it up.

        ``like`` gives the dtype and device, also on a rank that has no part.
        """
        return Accumulation(self, parts, like, what)

    def reversed(self) -> TransferPlan:
        """The redistribution from ``dst`` to ``src``: every replica of ``src`` gets the whole, nothing is added."""
        return transfer_plan(self.dst, self.src, self.shape)

    def __repr__(self) -> str:
        return f"TransferPlan({self.src} -> {self.dst}, {self.shape}, {len(self.receives)} peers)"


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One contiguous message; a single contiguous piece goes as it is."""
    if len(tensors) == 1:
        return tensors[0].contiguous()
    return torch.cat([t.reshape(-1) for t in tensors])


def _unpacked(message: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    flat = message.reshape(-1).split([math.prod(p.extents) for p in pieces])
    return [part.view(p.extents) for part, p in zip(flat, pieces, strict=True)]


class Transfer:
    """A plan under way."""

    def __init__(self, plan: TransferPlan, local: torch.Tensor, what: str) -> None:
        self._plan, self._local = plan, local.detach()
        self._parts = [local.new_empty(shape) for shape in plan.part_shapes]
        sends = [(peer.rank, _packed([self._local[p.src] for p in peer.pieces])) for peer in plan.sends]
        self._receives = [(peer, self._in_place(peer)) for peer in plan.receives]
        self._messages = [local.new_empty(peer.numel) if view is None else view for peer, view in self._receives]
        receives = [(peer.rank, message) for (peer, _), message in zip(self._receives, self._messages, strict=True)]
        self._exchange = Exchange(plan.comm, sends, receives, what)

    def _in_place(self, peer: Peer) -> torch.Tensor | None:
        """Where the message belongs, if that is one contiguous run: then it is received there without a copy."""
        piece = peer.pieces[0]
        view = self._parts[piece.part][piece.dst]
        return view if len(peer.pieces) == 1 and view.is_contiguous() else None

    def finish(self) -> list[torch.Tensor]:
        """Wait, and return the parts: this rank's block of ``dst``, or its slabs of ghosts."""
        for piece in self._plan.own:
            self._parts[piece.part][piece.dst] = self._local[piece.src]
        self._exchange.wait()
        for (peer, view), message in zip(self._receives, self._messages, strict=True):
            if view is None:
                for piece, values in zip(peer.pieces, _unpacked(message, peer.pieces), strict=True):
                    self._parts[piece.part][piece.dst] = values
        return self._parts


class Accumulation:
    """A plan under way in its adjoint direction."""

    def __init__(self, plan: TransferPlan, parts: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
        self._plan, self._parts = plan, [part.detach() for part in parts]
        sends = [(peer.rank, _packed([self._parts[p.part][p.dst] for p in peer.pieces])) for peer in plan.receives]
        self._messages: list[Message] = [(peer.rank, like.new_empty(peer.numel)) for peer in plan.sends]
        self._exchange = Exchange(plan.comm, sends, self._messages, what)

    def finish(self, into: torch.Tensor) -> torch.Tensor:
        """Wait, and add to ``into`` (this rank's block of ``src``) what other ranks held of it and its own part."""
        for piece in self._plan.own:
            into[piece.src] += self._parts[piece.part][piece.dst]
        self._exchange.wait()
        for peer, (_, message) in zip(self._plan.sends, self._messages, strict=True):
            for piece, values in zip(peer.pieces, _unpacked(message, peer.pieces), strict=True):
                into[piece.src] += values
        return into


@lru_cache(maxsize=4096)
def transfer_plan(src: Layout, dst: Layout, shape: tuple[int, ...], ghosts: bool = False) -> TransferPlan:
    """The cached plan for these layouts; its first use compares a digest over the ranks."""
    agreement.agree(src.grid.world, "transfer plan", f"{src} -> {dst} of shape {tuple(shape)}")
    return TransferPlan(src, dst, shape, ghosts=ghosts)
