"""What a rank needs of other ranks' sites: which, asked once, and their features, at each pass and back.

Sites come in any number, so messages say how many first. Who may have some is known beforehand from the boxes.
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
from distconv.layers.sparse.partition import Partition, grown, within


def swapped(
    comm: MPI.Intracomm, outgoing: Mapping[int, torch.Tensor], sources: Sequence[int], like: torch.Tensor, what: str
) -> dict[int, torch.Tensor]:
    """The rows, any number as wide as ``like``, that each of ``sources`` sends here; ``outgoing`` by rank, too."""
    counts = {rank: torch.zeros(1, dtype=torch.int64) for rank in sources}
    sent = [(rank, torch.tensor([len(rows)], dtype=torch.int64)) for rank, rows in outgoing.items()]
    Exchange(comm, sent, list(counts.items()), f"{what}: how many").wait()
    rows = {rank: like.new_empty(int(count), *like.shape[1:]) for rank, count in counts.items()}
    Exchange(comm, [(rank, t.contiguous()) for rank, t in outgoing.items()], list(rows.items()), what).wait()
    return rows


def at_owners(partition: Partition, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
    """Each site that any rank has in its ``coords`` on the rank that owns it, once and sorted. Collective.

    A rank's ``coords`` lie in its box grown by ``low`` and ``high``.
    """
    rank, comm = partition.grid.rank, partition.grid.world
    mine = partition.box(rank)
    targets = partition.others(grown(mine, low, high), rank)
    back = ([-h for h in high], [-v for v in low])
    sources = partition.others(grown(mine, *back), rank)
    owners = partition.owners(coords)
    outgoing = {target: coords[owners == target] for target in targets}
    received = swapped(comm, outgoing, sources, coords, "sites to their owners")
    return unique_rows(torch.cat([coords[owners == rank], *received.values()]))


def sent_rows(
    partition: Partition[Any], rank: int, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Rows of the sites ``coords`` of ``rank`` that lie in each other rank's box, grown by ``low`` and ``high``.

    Ranks whose boxes are near enough to have some, even if none is there.
    """
    back = ([-h for h in high], [-v for v in low])
    peers = partition.others(grown(partition.box(rank), *back), rank)
    return {peer: within(coords, grown(partition.box(peer), low, high)) for peer in peers}


class SiteHalo:
    """Other ranks' sites in this rank's box, grown by ``low`` and ``high``. Collective.

    ``coords`` are this rank's own and then those, (N + G, 1 + D).
    """

    def __init__(self, partition: Partition, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> None:
        rank, self.comm = partition.grid.rank, partition.grid.world
        self.sends = sent_rows(partition, rank, coords, low, high)
        sources = partition.others(grown(partition.box(rank), low, high), rank)
        outgoing = {peer: coords[rows] for peer, rows in self.sends.items()}
        received = swapped(self.comm, outgoing, sources, coords, "sites of the halo")
        self.receives = {peer: len(rows) for peer, rows in received.items()}
        self.own = len(coords)
        self.coords = torch.cat([coords, *received.values()])

    def extended(self, features: torch.Tensor) -> torch.Tensor:
        """Features (N + G, C) of ``coords`` from this rank's own (N, C); differentiable. Collective."""
        return apply(_Extend, features, self)


class _Extend(torch.autograd.Function):
    """Appends the halo's features; its adjoint adds their gradients where they came from."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, halo: SiteHalo) -> torch.Tensor:
        ctx.halo = halo
        out = features.new_empty(len(halo.coords), features.shape[1])
        ghosts = out[halo.own :].split(list(halo.receives.values()))
        sends = [(peer, features.index_select(0, rows)) for peer, rows in halo.sends.items()]
        exchange = Exchange(halo.comm, sends, list(zip(halo.receives, ghosts, strict=True)), "halo of sites")
        out[: halo.own] = features
        exchange.wait()
        return out

    @staticmethod
    @first_order_only("a halo of sites")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        halo: SiteHalo = ctx.halo
        grad = grad.contiguous()
        ghosts = grad[halo.own :].split(list(halo.receives.values()))
        received = {peer: grad.new_empty(len(rows), grad.shape[1]) for peer, rows in halo.sends.items()}
        sends = list(zip(halo.receives, ghosts, strict=True))
        exchange = Exchange(halo.comm, sends, list(received.items()), "halo of sites, back")
        dx = grad[: halo.own].clone()
        exchange.wait()
        for peer, rows in halo.sends.items():
            dx.index_add_(0, rows, received[peer])
        return dx, None
