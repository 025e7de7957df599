"""Messages between ranks among which the steps of a sequence are split.

The order of ranks is that of their steps: along the axis, or opposite to it for a layer in reverse direction::

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
    """The ranks of a grid along an axis, each with some of the steps."""

    grid: ProcessGrid
    axis: str
    max_steps: int
    """Largest number of steps on one rank."""
    reverse: bool
    """True if the last rank takes the first steps. Otherwise the first rank does."""

    @property
    def comm(self) -> MPI.Intracomm:
        """Communicator along the axis."""
        return self.grid.comm((self.axis,))

    @property
    def earlier(self) -> int | None:
        """The rank that takes the steps before these, or None for the first steps."""
        return self._neighbour(1 if self.reverse else -1)

    @property
    def later(self) -> int | None:
        """The rank that takes the steps after these, or None for the last steps."""
        return self._neighbour(-1 if self.reverse else 1)

    def _neighbour(self, distance: int) -> int | None:
        peer = self.comm.rank + distance
        return peer if 0 <= peer < self.comm.size else None

    def receive(self, peer: int | None, default: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a rank sends, or a default if there is no such rank.

        Parameters
        ----------
        peer : int or None
            The sender, which calls :meth:`send`.
        default : Tensor
            Has the shape and dtype of the message.

        Returns
        -------
        Tensor
            ``default`` itself if there is no peer.
        """
        if peer is None:
            return default
        received = torch.empty_like(default, memory_format=torch.contiguous_format)
        Exchange(self.comm, [], [(peer, received)], "state of a recurrence").wait()
        return received

    def send(self, peer: int | None, state: torch.Tensor) -> Exchange:
        """Start to send a state. Not blocking, so that a rank works on its next part meanwhile.

        Parameters
        ----------
        peer : int or None
            The receiver, which calls :meth:`receive`. None to send nothing.
        state : Tensor
            Must not be changed until the exchange has been waited for.

        Returns
        -------
        Exchange
        """
        messages = [] if peer is None else [(peer, state.contiguous())]
        exchange = Exchange(self.comm, messages, [], "state of a recurrence")
        exchange.post()
        return exchange

    def scan_gradient(self, matrix: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's last state from later steps, by a scan over the ranks.

        Collective: call on every rank along the axis. All steps of this rank map the gradient v after them to
        ``matrix`` v + ``shift``; after the last step of all ranks v is 0.

        Parameters
        ----------
        matrix : Tensor
            (B, H, H).
        shift : Tensor
            (B, H).

        Returns
        -------
        Tensor
            (B, H).
        """
        zeros = torch.zeros_like(shift)
        # In backward the last steps come first, so the rank that has them is the first rank of the scan.
        comm = self.comm if self.reverse else self.grid.reversed_comm(self.axis)
        # The scan gives the gradient before this rank's first step. The earlier rank needs it: for that rank it is the
        # gradient after its last step.
        entry_gradient = backpropagate(zeros, matrix[None], "blelloch", comm, sources=shift[None])[0].contiguous()
        sent = self.send(self.earlier, entry_gradient)
        received = self.receive(self.later, zeros)
        sent.wait()
        return received
