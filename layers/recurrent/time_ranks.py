"""Ranks that share the steps of a sequence: what each hands to the next, in the order in which they take their steps.

Rank by rank along the axis, or the other way round for a layer that goes through its sequence backwards::

    forward    state   rank 0 -> rank 1 -> rank 2
    backward   dl/dh   rank 0 <- rank 1 <- rank 2       or a scan over the ranks
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mpi4py import MPI

from distconv.communication.transport import Exchange
from distconv.grid import ProcessGrid
from distconv.kernels.scan import backpropagate


@dataclass(frozen=True, eq=False)
class TimeRanks:
    """The ranks of ``grid`` along ``axis``, each with some of the steps; ``reverse`` where the last rank begins."""

    grid: ProcessGrid
    axis: str
    longest: int
    """Most steps that any of them has."""
    reverse: bool

    @property
    def comm(self) -> MPI.Intracomm:
        """Communicator along the axis."""
        return self.grid.comm((self.axis,))

    @property
    def earlier(self) -> int | None:
        """The rank that takes the steps before these, if there is one."""
        return self._neighbour(1 if self.reverse else -1)

    @property
    def later(self) -> int | None:
        """The rank that takes the steps behind these, if there is one."""
        return self._neighbour(-1 if self.reverse else 1)

    def _neighbour(self, distance: int) -> int | None:
        peer = self.comm.rank + distance
        return peer if 0 <= peer < self.comm.size else None

    def receive(self, peer: int | None, first: torch.Tensor) -> torch.Tensor:
        """What ``peer`` sends, shaped like ``first``; that itself where there is no peer."""
        if peer is None:
            return first
        received = torch.empty_like(first, memory_format=torch.contiguous_format)
        Exchange(self.comm, [], [(peer, received)], "state of a recurrence").wait()
        return received

    def send(self, peer: int | None, state: torch.Tensor) -> Exchange:
        """Begin to send ``state``, if there is a peer; it must be left alone until the exchange is waited for."""
        messages = [] if peer is None else [(peer, state.contiguous())]
        exchange = Exchange(self.comm, messages, [], "state of a recurrence")
        exchange.post()
        return exchange

    def scanned(self, matrix: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """What reaches the last of this rank's steps from behind, (B, H), by a scan over the ranks.

        Those of a rank together turn v into ``matrix`` (B, H, H) v + ``shift`` (B, H); behind all steps v is 0.
        """
        nothing = torch.zeros_like(shift)
        # Gradients come to the last steps first: the scan's first rank is the one that takes them.
        comm = self.comm if self.reverse else self.grid.reversed_comm(self.axis)
        reached = backpropagate(nothing, matrix[None], "blelloch", comm, sources=shift[None])[0].contiguous()
        sent = self.send(self.earlier, reached)
        received = self.receive(self.later, nothing)
        sent.wait()
        return received
