"""The mover: everything that crosses ranks is an intersection of boxes.

A :class:`TransferPlan` moves a tensor from the layout ``src`` (who owns what) to the layout ``dst`` (who needs what).
Redistribution, scatter, gather, halo exchange and what crosses between pipeline stages differ only in their two
layouts, and in whether these are over the same ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from mpi4py import MPI

from distconv.communication import agreement
from distconv.communication.packing import Packing
from distconv.communication.routes import Layout, Needs, Peer, Routes
from distconv.communication.transport import Exchange, Message
from distconv.distribution import Distribution, Region
from distconv.errors import DistributionError
from distconv.grid import ProcessGrid, cached_on_grid
from distconv.process.profiling import section

GridLayout = Distribution | Needs
"""A layout over the ranks of a process grid."""


class TransferPlan(Routes):
    """Moves a tensor of ``shape`` from layout ``src`` to layout ``dst``.

    Both are over the ranks of one process grid, or over two groups of ranks of ``comm``, ``sources`` and ``targets``,
    which may share some: see :class:`Routes` for who sends what to whom.

    Reversible in two ways: ``start_accumulate`` sends overlapping needs back and adds them up at the owners;
    ``reversed()`` is the redistribution in the other direction, where nothing is added.

    Within a grid build it through :func:`transfer_plan`, which caches.

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
        *,
        ghosts: bool = False,
        comm: MPI.Intracomm | None = None,
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> None:
        if comm is None:
            if not isinstance(src.grid, ProcessGrid):
                raise DistributionError(f"a transfer from {src}, which is over no communicator, needs comm=")
            comm = src.grid.world
        self.comm = comm
        self.crosses_ranks = False
        """True if any rank of the grid sends a message. Otherwise none does, or it is not known."""
        super().__init__(src, dst, shape, comm.rank, sources=sources, targets=targets, ghosts=ghosts)

    @property
    def silent(self) -> bool:
        """Whether this rank neither sends nor receives."""
        return not self.sends and not self.receives

    @cached_property
    def sent_boxes(self) -> Packing:
        """What goes to each peer, as boxes of this rank's block of ``src``."""
        return Packing([[Region(0, _first(p.src), p.extents) for p in peer.pieces] for peer in self.sends])

    @cached_property
    def received_boxes(self) -> Packing:
        """What comes from each peer, as boxes of this rank's parts."""
        return Packing([[Region(p.part, _first(p.dst), p.extents) for p in peer.pieces] for peer in self.receives])

    def start(self, local: torch.Tensor, what: str = "transfer") -> Transfer:
        """Post all messages from ``local`` (this rank's block of ``src``); ``finish()`` gives the parts.

        On a rank outside ``src`` only the dtype and the device of ``local`` count.
        """
        self._check_order(what)
        return Transfer(self, local, what)

    def move(self, local: torch.Tensor, what: str = "transfer") -> torch.Tensor:
        """This rank's block of ``dst``, given its block of ``src``; for a rank of both."""
        self._check_order(what)
        if self.silent and self._keeps_everything():
            return local
        return Transfer(self, local, what).finish()[0]

    def _check_order(self, what: str) -> None:
        # By crosses_ranks and not by silent, which differs between ranks: all of them take part in the comparison.
        if self.crosses_ranks:
            agreement.check_order(self.comm, what)

    def _keeps_everything(self) -> bool:
        return len(self.own) == 1 and self.own[0].extents == self.local_shape == self.part_shapes[0]

    def start_accumulate(
        self, parts: Sequence[torch.Tensor], like: torch.Tensor, what: str = "transfer back"
    ) -> Accumulation:
        """Post the way back: what was received goes to its owner, where ``finish(into)`` adds it up.

        ``like`` gives the dtype and device, also on a rank that has no part.
        """
        self._check_order(what)
        return Accumulation(self, parts, like, what)

    def reversed(self) -> TransferPlan:
        """The redistribution from ``dst`` to ``src``: every replica of ``src`` gets the whole, nothing is added."""
        return self._reversed

    @cached_property
    def _reversed(self) -> TransferPlan:
        plan = TransferPlan(self.dst, self.src, self.shape, comm=self.comm, sources=self.targets, targets=self.sources)
        plan.crosses_ranks = self.crosses_ranks
        return plan

    def __repr__(self) -> str:
        return f"TransferPlan({self.src} -> {self.dst}, {self.shape}, {len(self.receives)} peers)"


def _first(box: Sequence[slice]) -> tuple[int, ...]:
    return tuple(each.start for each in box)


class Transfer:
    """A plan under way."""

    def __init__(self, plan: TransferPlan, local: torch.Tensor, what: str) -> None:
        # Detached: how gradients come back is said by whoever calls, as a plan of its own.
        self._plan, self._local = plan, local.detach()
        self._parts = [local.new_empty(shape) for shape in plan.part_shapes]
        with section("pack"):
            sends = _addressed(plan.sends, plan.sent_boxes.pack([self._local]))
        self._room = plan.received_boxes.room(self._parts)
        self._exchange = Exchange(plan.comm, sends, _addressed(plan.receives, self._room.messages), what)

    def finish(self) -> list[torch.Tensor]:
        """Wait, and return the parts: this rank's block of ``dst``, or its slabs of ghosts; none outside ``dst``."""
        # What stays on this rank is copied while the messages are under way.
        for piece in self._plan.own:
            self._parts[piece.part][piece.dst] = self._local[piece.src]
        self._exchange.wait()
        with section("unpack"):
            self._plan.received_boxes.unpack(self._room, self._parts)
        return self._parts


class Accumulation:
    """A plan under way in its adjoint direction."""

    def __init__(self, plan: TransferPlan, parts: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
        self._plan, self._parts = plan, [part.detach() for part in parts]
        with section("pack"):
            sends = _addressed(plan.receives, plan.received_boxes.pack(self._parts))
        self._room = plan.sent_boxes.room_for_sums(like)
        self._exchange = Exchange(plan.comm, sends, _addressed(plan.sends, self._room.messages), what)

    def finish(self, into: torch.Tensor) -> torch.Tensor:
        """Wait, and add to ``into`` (this rank's block of ``src``) what other ranks held of it and its own part."""
        # The own share first, then those of the peers by rank: the same order in every run, so the same roundoff.
        for piece in self._plan.own:
            into[piece.src] += self._parts[piece.part][piece.dst]
        self._exchange.wait()
        with section("unpack"):
            self._plan.sent_boxes.add(self._room, [into])
        return into


def _addressed(peers: Sequence[Peer], messages: Sequence[torch.Tensor]) -> list[Message]:
    return [(peer.rank, message) for peer, message in zip(peers, messages, strict=True)]


@cached_on_grid
def transfer_plan(src: GridLayout, dst: GridLayout, shape: tuple[int, ...], ghosts: bool = False) -> TransferPlan:
    """The cached plan for these layouts; its first use compares a digest over the ranks."""
    agreement.check_same_on_all_ranks(src.grid.world, "transfer plan", f"{src} -> {dst} of shape {tuple(shape)}")
    plan = TransferPlan(src, dst, shape, ghosts=ghosts)
    if agreement.level != "off":
        plan.crosses_ranks = bool(agreement.allreduce_max(plan.comm, not plan.silent, "transfer plan"))
    return plan
