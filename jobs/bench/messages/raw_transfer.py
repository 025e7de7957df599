"""Transfers by MPI alone, as a reference: copies and messages, with all buffers ready."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from mpi4py import MPI

from distconv.communication.routes import Peer, TransferBox
from distconv.communication.transfer import TransferPlan

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a destination and a source of the same shape."""


class RawTransfer:
    """The transfer of ``plan`` from ``local`` into ``parts``, float32 on the host."""

    def __init__(self, plan: TransferPlan, local: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        self.comm = plan.comm
        self.sent = torch.zeros(sum(peer.numel for peer in plan.sends))
        self.received = torch.zeros(sum(peer.numel for peer in plan.receives))
        self._sends, self._receives = _runs(plan.sends, self.sent), _runs(plan.receives, self.received)
        self._packs: Copies = [(message, local[p.src]) for p, message in _messages(plan.sends, self.sent)]
        self._unpacks: Copies = [
            (parts[p.destination][p.dst], message) for p, message in _messages(plan.receives, self.received)
        ]
        self._unpacks += [(parts[p.destination][p.dst], local[p.src]) for p in plan.own]

    def messages(self) -> None:
        """Exchange the messages only."""
        # Receives go first: a send that finds no posted receive is copied once more.
        requests = [self.comm.Irecv(run.numpy(), rank) for rank, run in self._receives]
        requests += [self.comm.Isend(run.numpy(), rank) for rank, run in self._sends]
        MPI.Request.Waitall(requests)

    def point_to_point(self) -> None:
        """Pack, send and receive, unpack."""
        self._copy(self._packs)
        self.messages()
        self._copy(self._unpacks)

    def all_to_all(self) -> None:
        """Pack, one Alltoallv, unpack."""
        self._copy(self._packs)
        self.comm.Alltoallv(self._counts(self.sent, self._sends), self._counts(self.received, self._receives))
        self._copy(self._unpacks)

    def _counts(self, buffer: torch.Tensor, runs: list[tuple[int, torch.Tensor]]) -> list[object]:
        sizes, starts = [0] * self.comm.size, [0] * self.comm.size
        for rank, run in runs:
            sizes[rank], starts[rank] = run.numel(), int(run.storage_offset())
        return [buffer.numpy(), sizes, starts, MPI.FLOAT]

    @staticmethod
    def _copy(copies: Copies) -> None:
        for to, source in copies:
            to.copy_(source)


def _runs(peers: Sequence[Peer], buffer: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return the part of the buffer of each peer."""
    parts = buffer.split([peer.numel for peer in peers])
    return [(peer.rank, part) for peer, part in zip(peers, parts, strict=True)]


def _messages(peers: Sequence[Peer], buffer: torch.Tensor) -> list[tuple[TransferBox, torch.Tensor]]:
    """Return the part of the buffer of each block, in the shape of the block."""
    pieces = [piece for peer in peers for piece in peer.boxes]
    parts = buffer.split([math.prod(piece.extents) for piece in pieces])
    return [(piece, part.view(piece.extents)) for piece, part in zip(pieces, parts, strict=True)]
