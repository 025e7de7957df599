"""Exchange of the sites and features that a rank needs from other ranks.

The sites of a halo are exchanged once, and their features in each pass. In backward the gradients of features return to
the owners. Receivers cannot compute the number of sites, so a first message announces it. The ranks that may have
some sites follow from the boxes. :mod:`~distconv.layers.sparse.distributed` calls this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from distconv.autograd.derivatives import first_order_only
from distconv.communication.collectives import apply
from distconv.communication.transport import Exchange
from distconv.kernels.sparse.coordinates import unique_rows
from distconv.layers.sparse.partition import Partition, grow_box, rows_in_box


def exchange_rows(
    comm: MPI.Intracomm, outgoing: Mapping[int, torch.Tensor], sources: Sequence[int], like: torch.Tensor, what: str
) -> dict[int, torch.Tensor]:
    """Exchange rows with other ranks; a first message announces the number of rows.

    Collective among ranks that name each other as sources and targets.

    Parameters
    ----------
    comm : MPI.Intracomm
    outgoing : mapping of int to Tensor
        The rows to send to each rank.
    sources : sequence of int
        Ranks that send rows to this rank.
    like : Tensor
        Has the dtype, the device and the row shape of the received rows.
    what : str
        Description of the exchange for errors and the watchdog.

    Returns
    -------
    dict of int to Tensor
        The received rows by source.
    """
    # 1. Numbers of rows, also zeros: the receiver knows only who may have some. 2. Rows, into buffers of these sizes.
    counts = {rank: torch.zeros(1, dtype=torch.int64) for rank in sources}
    sent = [(rank, torch.tensor([len(rows)], dtype=torch.int64)) for rank, rows in outgoing.items()]
    Exchange(comm, sent, list(counts.items()), f"{what}: row counts").wait()
    rows = {rank: like.new_empty(int(count), *like.shape[1:]) for rank, count in counts.items()}
    Exchange(comm, [(rank, t.contiguous()) for rank, t in outgoing.items()], list(rows.items()), what).wait()
    return rows


def send_to_owners(partition: Partition, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
    """Return the sites that this rank owns among the sites that all ranks pass, unique and sorted.

    Collective: call on every rank.

    Parameters
    ----------
    partition : Partition
    coords : Tensor
        Sites (N, 1 + D) in this rank's box grown by ``low`` and ``high``.
    low, high : sequence of int
        As in :func:`~distconv.layers.sparse.partition.grow_box`: displacements of the lower and upper ends, so ``low``
        is usually negative.

    Returns
    -------
    Tensor
        (N', 1 + D).
    """
    rank, comm = partition.grid.rank, partition.grid.world
    own_box = partition.box(rank)
    targets = partition.intersecting_ranks(grow_box(own_box, low, high), rank)
    # A rank whose grown box meets this box is one that this box, grown the other way, meets. So each target of a rank
    # has that rank among its sources, and no message stays without a receiver.
    back = ([-h for h in high], [-v for v in low])
    sources = partition.intersecting_ranks(grow_box(own_box, *back), rank)
    owners = partition.owners(coords)
    outgoing = {target: coords[owners == target] for target in targets}
    # Several ranks may derive the same site, hence unique.
    received = exchange_rows(comm, outgoing, sources, coords, "sites to their owners")
    return unique_rows(torch.cat([coords[owners == rank], *received.values()]))


def rows_by_peer(
    partition: Partition[Any], rank: int, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Return the rows of sites that lie in the grown box of each other rank.

    No communication.

    Parameters
    ----------
    partition : Partition
    rank : int
        The owner of the sites.
    coords : Tensor
        Sites (N, 1 + D) of ``rank``.
    low, high : sequence of int
        Displacement of the ends of a box for each spatial dimension.

    Returns
    -------
    dict of int to Tensor
        Row indices by rank, for all ranks whose grown boxes intersect this rank's box, even if no site is in them.
    """
    back = ([-h for h in high], [-v for v in low])
    peers = partition.intersecting_ranks(grow_box(partition.box(rank), *back), rank)
    return {peer: rows_in_box(coords, grow_box(partition.box(peer), low, high)) for peer in peers}


@dataclass(eq=False)
class RowExchange:
    """Rows that ranks send to each other: own rows come first in the result, then those of each source."""

    comm: MPI.Intracomm
    rows: int
    """Number of rows on this rank before the exchange."""
    kept: torch.Tensor
    """Rows of this rank that it needs itself."""
    sends: dict[int, torch.Tensor]
    """Rows of this rank that other ranks need, by rank."""
    receives: dict[int, int]
    """Number of rows from each other rank, in the order of the result."""

    @classmethod
    def to_owners(cls, comm: MPI.Intracomm, owners: torch.Tensor) -> RowExchange:
        """Return the exchange that sends each row to one rank. Collective: call on every rank.

        Parameters
        ----------
        comm : MPI.Intracomm
        owners : Tensor
            Rank that needs each of this rank's rows, (N,).

        Returns
        -------
        RowExchange
        """
        rows = [(owners == rank).nonzero()[:, 0] for rank in range(comm.size)]
        counts = comm.alltoall([len(each) for each in rows])
        # Both sides know the counts, so empty messages are left out.
        sends = {rank: each for rank, each in enumerate(rows) if rank != comm.rank and len(each)}
        receives = {rank: count for rank, count in enumerate(counts) if rank != comm.rank and count}
        return cls(comm, len(owners), rows[comm.rank], sends, receives)

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Return the kept and the received rows; differentiable.

        Collective: call on every rank.

        Parameters
        ----------
        values : Tensor
            Values (N, C) of this rank's rows.

        Returns
        -------
        Tensor
            (N', C).
        """
        return apply(_Send, values, self)

    def send_back(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the rows of :meth:`send` to the ranks that have sent them; differentiable.

        Collective: call on every rank. The adjoint of :meth:`send`: values of a row from several ranks are added.

        Parameters
        ----------
        values : Tensor
            Values (N', C) of the kept and the received rows.

        Returns
        -------
        Tensor
            Values (N, C) of this rank's rows.
        """
        return apply(_SendBack, values, self)


class SiteHalo(RowExchange):
    """The sites of other ranks in this rank's box grown by ``low`` and ``high``.

    Collective: create it on every rank.

    Parameters
    ----------
    partition : Partition
    coords : Tensor
        This rank's own sites (N, 1 + D).
    low, high : sequence of int
        As in :func:`~distconv.layers.sparse.partition.grow_box`.

    Attributes
    ----------
    coords : Tensor
        This rank's N sites, followed by the G sites of the halo, (N + G, 1 + D).
    """

    def __init__(self, partition: Partition, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> None:
        rank, comm = partition.grid.rank, partition.grid.world
        sends = rows_by_peer(partition, rank, coords, low, high)
        sources = partition.intersecting_ranks(grow_box(partition.box(rank), low, high), rank)
        outgoing = {peer: coords[rows] for peer, rows in sends.items()}
        received = exchange_rows(comm, outgoing, sources, coords, "sites of the halo")
        receives = {peer: len(rows) for peer, rows in received.items()}
        super().__init__(comm, len(coords), torch.arange(len(coords), device=coords.device), sends, receives)
        self.coords = torch.cat([coords, *received.values()])


def _send_rows(values: torch.Tensor, plan: RowExchange) -> torch.Tensor:
    """Return the kept and the received rows. Collective."""
    # Messages arrive in their rows of the result. Own rows are copied while they are in flight.
    own = len(plan.kept)
    out = values.new_empty(own + sum(plan.receives.values()), values.shape[1])
    received = out[own:].split(list(plan.receives.values()))
    sends = [(peer, values.index_select(0, rows)) for peer, rows in plan.sends.items()]
    exchange = Exchange(plan.comm, sends, list(zip(plan.receives, received, strict=True)), "rows of sites")
    torch.index_select(values, 0, plan.kept, out=out[:own])
    exchange.wait()
    return out


def _send_rows_back(values: torch.Tensor, plan: RowExchange) -> torch.Tensor:
    """Return the sums of the values of each row at its first rank. Collective."""
    values, own = values.contiguous(), len(plan.kept)
    outgoing = values[own:].split(list(plan.receives.values()))
    received = {peer: values.new_empty(len(rows), values.shape[1]) for peer, rows in plan.sends.items()}
    sends = list(zip(plan.receives, outgoing, strict=True))
    exchange = Exchange(plan.comm, sends, list(received.items()), "rows of sites, back")
    out = values.new_zeros(plan.rows, values.shape[1]).index_copy_(0, plan.kept, values[:own])
    exchange.wait()
    # Several ranks may have needed one row. Added in the order of ranks, so that rounding is reproducible.
    for peer, rows in plan.sends.items():
        out.index_add_(0, rows, received[peer])
    return out


class _Send(torch.autograd.Function):
    """Values of this rank's rows -> values of the kept and the received rows."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, plan: RowExchange) -> torch.Tensor:
        ctx.plan = plan
        return _send_rows(values, plan)

    @staticmethod
    @first_order_only("an exchange of rows of sites")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _send_rows_back(grad, ctx.plan), None


class _SendBack(torch.autograd.Function):
    """The adjoint of _Send."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, plan: RowExchange) -> torch.Tensor:
        ctx.plan = plan
        return _send_rows_back(values, plan)

    @staticmethod
    @first_order_only("an exchange of rows of sites")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _send_rows(grad, ctx.plan), None
