"""Exchange of the sites and features that a rank needs from other ranks.

The sites of a halo are exchanged once, and their features in each pass. In backward the gradients of features return to
the owners. Receivers cannot compute the number of sites, so a first message announces it. The ranks that may have
some sites follow from the boxes. :mod:`~distconv.layers.sparse.distributed` calls this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class SiteHalo:
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
    own_rows : int
        N.
    sends : dict of int to Tensor
        Rows of own sites that other ranks need, by rank.
    receives : dict of int to int
        Number of sites from each other rank, in the order of their rows in ``coords``.
    """

    def __init__(self, partition: Partition, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> None:
        rank, self.comm = partition.grid.rank, partition.grid.world
        self.sends = rows_by_peer(partition, rank, coords, low, high)
        sources = partition.intersecting_ranks(grow_box(partition.box(rank), low, high), rank)
        outgoing = {peer: coords[rows] for peer, rows in self.sends.items()}
        received = exchange_rows(self.comm, outgoing, sources, coords, "sites of the halo")
        self.receives = {peer: len(rows) for peer, rows in received.items()}
        self.own_rows = len(coords)
        self.coords = torch.cat([coords, *received.values()])

    def append_halo(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features of ``coords``; differentiable.

        Collective: call on every rank.

        Parameters
        ----------
        features : Tensor
            Features (N, C) of this rank's own sites.

        Returns
        -------
        Tensor
            (N + G, C).
        """
        return apply(_Extend, features, self)


class _Extend(torch.autograd.Function):
    """Append the features of the halo; the adjoint adds their gradients at the owners."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, halo: SiteHalo) -> torch.Tensor:
        ctx.halo = halo
        # Messages arrive in their rows of the result. Own rows are copied while they are in flight.
        out = features.new_empty(len(halo.coords), features.shape[1])
        ghosts = out[halo.own_rows :].split(list(halo.receives.values()))
        sends = [(peer, features.index_select(0, rows)) for peer, rows in halo.sends.items()]
        exchange = Exchange(halo.comm, sends, list(zip(halo.receives, ghosts, strict=True)), "halo of sites")
        out[: halo.own_rows] = features
        exchange.wait()
        return out

    @staticmethod
    @first_order_only("a halo of sites")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        halo: SiteHalo = ctx.halo
        grad = grad.contiguous()
        ghosts = grad[halo.own_rows :].split(list(halo.receives.values()))
        received = {peer: grad.new_empty(len(rows), grad.shape[1]) for peer, rows in halo.sends.items()}
        sends = list(zip(halo.receives, ghosts, strict=True))
        exchange = Exchange(halo.comm, sends, list(received.items()), "reverse halo of sites")
        dx = grad[: halo.own_rows].clone()
        exchange.wait()
        # Several ranks may have needed one row. Added in the order of ranks, so that rounding is reproducible.
        for peer, rows in halo.sends.items():
            dx.index_add_(0, rows, received[peer])
        return dx, None
