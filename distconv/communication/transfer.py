"""Transfer plans: move a tensor from one layout to another, or add overlapping boxes up at their owners.

A :class:`TransferPlan` moves a tensor from the layout ``src`` (who owns what) to the layout ``dst`` (who needs what).
Redistribution, scatter, gather, halo exchange and the messages between pipeline stages differ only in their two
layouts, and in whether these are over the same ranks. A plan is made once (:mod:`.routes`) and used many times::

    forward   start(local)            pack, send and receive     finish()      unpack: blocks or ghosts
    backward  start_accumulate(...)   the same boxes, backwards  finish(into)  add what arrived to the owned block

This module does not use autograd: :mod:`.collectives` and the layers make pairs of a forward and a backward pass from
a plan. Messages have no tags, so all ranks must call ``start`` and ``start_accumulate`` of their plans in the same
order. They may call ``finish`` in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from mpi4py import MPI

from distconv.communication import agreement
from distconv.communication.packing import Packing
from distconv.communication.routes import IndexLayout, Needs, Peer, Routes
from distconv.communication.transport import Exchange, Message
from distconv.distribution import Distribution, Region
from distconv.errors import DistributionError
from distconv.grid import ProcessGrid, cached_on_grid
from distconv.memory_format import new_empty
from distconv.process.profiling import section

GridLayout = Distribution | Needs
"""A layout over the ranks of a process grid."""


@cached_on_grid
def transfer_plan(src: GridLayout, dst: GridLayout, shape: tuple[int, ...], ghosts: bool = False) -> TransferPlan:
    """Return the plan for two layouts over a process grid, from a cache.

    Collective at its first use: the ranks compare the arguments.

    Parameters
    ----------
    src, dst, shape, ghosts
        As in :class:`TransferPlan`.

    Returns
    -------
    TransferPlan
        The same object in each call with equal arguments.

    Raises
    ------
    MismatchError
        On every rank, if the arguments differ.
    DistributionError
        If the layouts do not fit each other or the shape.
    """
    # Plans that differ would send messages of other sizes or to other ranks: a hang, or wrong values.
    agreement.check_same_on_all_ranks(src.grid.world, "transfer plan", f"{src} -> {dst} of shape {tuple(shape)}")
    plan = TransferPlan(src, dst, shape, ghosts=ghosts)
    # Once for each plan. Later calls know without communication whether any rank sends a message.
    if agreement.level != "off":
        plan.crosses_ranks = bool(agreement.allreduce_max(plan.comm, not plan.is_local, "transfer plan"))
    return plan


class TransferPlan(Routes):
    """Moves a tensor from one layout to another. Use :func:`transfer_plan` where both are over one process grid.

    It has two inverses: ``start_accumulate`` returns overlapping boxes to their owners, which add them up (the adjoint
    of a halo exchange); ``reversed()`` is the redistribution in the other direction, which adds nothing.

    Parameters
    ----------
    src, dst, shape, ghosts, sources, targets
        As in :class:`Routes`.
    comm : MPI.Intracomm, optional
        The communicator whose ranks ``sources`` and ``targets`` are. By default that of the process grid of ``src``.

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
        *,
        ghosts: bool = False,
        comm: MPI.Intracomm | None = None,
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> None:
        if comm is None:
            if not isinstance(src.grid, ProcessGrid):
                raise DistributionError(f"transfer: {src} has no communicator. Pass comm=.")
            comm = src.grid.world
        self.comm = comm
        self.crosses_ranks = False
        """True if any rank of the grid sends a message. Otherwise none does, or it is not known."""
        super().__init__(src, dst, shape, comm.rank, sources=sources, targets=targets, ghosts=ghosts)

    @property
    def is_local(self) -> bool:
        """True if this rank neither sends nor receives. Other ranks may."""
        return not self.sends and not self.receives

    @cached_property
    def send_packing(self) -> Packing:
        """The messages to the peers: boxes of this rank's block of ``src``."""
        return Packing([[Region(0, _start(box.src), box.extents) for box in peer.boxes] for peer in self.sends])

    @cached_property
    def receive_packing(self) -> Packing:
        """The messages from the peers: boxes of the tensors that this rank receives into."""
        return Packing(
            [[Region(box.destination, _start(box.dst), box.extents) for box in peer.boxes] for peer in self.receives]
        )

    def start(self, local: torch.Tensor, what: str = "transfer") -> Transfer:
        """Start all sends and receives. Collective: call on every rank of the plan.

        Parameters
        ----------
        local : Tensor
            This rank's block of ``src``; do not change it before ``finish``. On a rank outside ``src`` only its dtype
            and device matter.
        what : str
            The operation, for errors and the watchdog's report.

        Returns
        -------
        Transfer
            Call its ``finish()`` for the tensors received.
        """
        self._check_order(what)
        return Transfer(self, local, what)

    def move(self, local: torch.Tensor, what: str = "transfer") -> torch.Tensor:
        """Move a block and wait for it; for a rank of both layouts. Collective: call on every rank of the plan.

        Parameters
        ----------
        local, what
            As in :meth:`start`.

        Returns
        -------
        Tensor
            This rank's block of ``dst``. It is ``local`` itself if the rank keeps all of it and nothing else.
        """
        self._check_order(what)
        # One box that is all of the block and all of the result: nothing moves.
        kept = [box.extents for box in self.own]
        if self.is_local and kept == [self.local_shape] == list(self.destination_shapes):
            return local
        return Transfer(self, local, what).finish()[0]

    def _check_order(self, what: str) -> None:
        # Not by is_local, which differs between ranks: all of them must take part in the comparison.
        if self.crosses_ranks:
            agreement.check_order(self.comm, what)

    def start_accumulate(
        self, parts: Sequence[torch.Tensor], like: torch.Tensor, what: str = "transfer back"
    ) -> Accumulation:
        """Start to return values to their owners, which add them up. Collective: call on every rank of the plan.

        Parameters
        ----------
        parts : sequence of Tensor
            One for each of ``destinations``, of ``destination_shapes``.
        like : Tensor
            Has the dtype and device, also on a rank that has no part.
        what : str
            As in :meth:`start`.

        Returns
        -------
        Accumulation
            Call its ``finish(into)`` to add what arrived.
        """
        self._check_order(what)
        return Accumulation(self, parts, like, what)

    def reversed(self) -> TransferPlan:
        """Return the plan of the redistribution from ``dst`` to ``src``, which adds nothing.

        Returns
        -------
        TransferPlan
            Each replica of ``src`` receives its full block.
        """
        return self._reversed

    @cached_property
    def _reversed(self) -> TransferPlan:
        plan = TransferPlan(self.dst, self.src, self.shape, comm=self.comm, sources=self.targets, targets=self.sources)
        # The same pairs of ranks exchange messages, so nothing has to be compared again.
        plan.crosses_ranks = self.crosses_ranks
        return plan

    def __repr__(self) -> str:
        return f"TransferPlan({self.src} -> {self.dst}, {self.shape}, {len(self.receives)} peers)"


class Transfer:
    """A plan in flight, from ``src`` to ``dst``."""

    def __init__(self, plan: TransferPlan, local: torch.Tensor, what: str) -> None:
        # Detached: the caller's autograd function defines the gradient, with a transfer of its own.
        self._plan, self._local = plan, local.detach()
        # Uninitialized: messages and the rank's own boxes cover all indices.
        self._received = [new_empty(local, shape) for shape in plan.destination_shapes]
        with section("pack"):
            sends = _address(plan.sends, plan.send_packing.pack([self._local]))
        self._buffers = plan.receive_packing.allocate_for_unpack(self._received)
        self._exchange = Exchange(plan.comm, sends, _address(plan.receives, self._buffers.messages), what)

    def finish(self) -> list[torch.Tensor]:
        """Wait for the messages and return the tensors received.

        Returns
        -------
        list of Tensor
            One for each of the plan's ``destinations``: this rank's block of ``dst``, or its slabs of ghosts. Empty on
            a rank outside ``dst``.
        """
        # What stays on this rank is copied while the messages are in flight.
        for box in self._plan.own:
            self._received[box.destination][box.dst] = self._local[box.src]
        self._exchange.wait()
        with section("unpack"):
            self._plan.receive_packing.unpack(self._buffers, self._received)
        return self._received


class Accumulation:
    """A plan in flight in its adjoint direction, from ``dst`` to ``src``."""

    def __init__(self, plan: TransferPlan, parts: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
        self._plan, self._parts = plan, [part.detach() for part in parts]
        with section("pack"):
            # The roles of both packings are exchanged: messages go back to the ranks that sent them.
            sends = _address(plan.receives, plan.receive_packing.pack(self._parts))
        self._buffers = plan.send_packing.allocate_for_add(like)
        self._exchange = Exchange(plan.comm, sends, _address(plan.sends, self._buffers.messages), what)

    def finish(self, into: torch.Tensor) -> torch.Tensor:
        """Wait for the messages and add what arrived, and this rank's own part, to its block.

        Parameters
        ----------
        into : Tensor
            This rank's block of ``src``; changed in place.

        Returns
        -------
        Tensor
            ``into``.
        """
        # This rank's own part first, then those of the peers by rank: the same order in every run, so the same
        # roundoff error.
        for box in self._plan.own:
            into[box.src] += self._parts[box.destination][box.dst]
        self._exchange.wait()
        with section("unpack"):
            self._plan.send_packing.add(self._buffers, [into])
        return into


def _start(box: Sequence[slice]) -> tuple[int, ...]:
    return tuple(each.start for each in box)


def _address(peers: Sequence[Peer], messages: Sequence[torch.Tensor]) -> list[Message]:
    return [(peer.rank, message) for peer, message in zip(peers, messages, strict=True)]
