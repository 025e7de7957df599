"""Messages and all-reduces of a replay, without the checks of an eager step; waits that the watchdog reports.

:mod:`.replay_code` makes one object for each operation; the generated code calls it in each replay, in the order of the
recording. That order is the order of the eager step, and so compatible between ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.communication.gpu.nccl import Channel, Launch
from distconv.communication.transport import mpi_buffers, mpi_type
from distconv.errors import NumericalError
from distconv.process import watchdog

Requests = list[Any]

_ident, _now, _wait_all = threading.get_ident, time.monotonic, MPI.Request.Waitall


class PersistentExchange:
    """Messages between buffers that are kept between replays: persistent MPI requests, made once.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    sends, receives : sequence of (int, Tensor)
        Peers, and contiguous tensors to send and to receive into, which are kept alive.
    tag : int
        Message tag.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        tag: int = 0,
    ) -> None:
        self._memory = [tensor for _, tensor in (*sends, *receives)]
        # Receives first, as in an eager exchange: Startall starts requests in this order.
        self.requests = [comm.Recv_init([part, MPI.BYTE], peer, tag) for peer, t in receives for part in mpi_buffers(t)]
        self.requests += [comm.Send_init([part, MPI.BYTE], peer, tag) for peer, t in sends for part in mpi_buffers(t)]
        self._start = MPI.Prequest.Startall

    def __call__(self) -> Requests:
        """Start the messages."""
        self._start(self.requests)
        return self.requests

    # Python does not free persistent requests, and after the end of MPI they no longer exist.
    def __del__(self) -> None:
        if not MPI.Is_finalized():
            for request in self.requests:
                request.Free()


class ExchangeStart:
    """Messages of an exchange between tensors that are new in each replay.

    Call it with the tensors to send followed by the tensors to receive into, in the order of the peers.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    targets, sources : sequence of int
        Peers to send to and to receive from.
    """

    def __init__(self, comm: MPI.Intracomm, targets: Sequence[int], sources: Sequence[int]) -> None:
        self._comm, self._targets, self._sources = comm, targets, sources

    def __call__(self, *tensors: torch.Tensor) -> Requests:
        """Start the messages, receives first as :class:`~distconv.communication.transport.Exchange` does."""
        sends, comm, byte = len(self._targets), self._comm, MPI.BYTE
        requests = [
            comm.Irecv([part, byte], peer)
            for peer, tensor in zip(self._sources, tensors[sends:], strict=True)
            for part in mpi_buffers(tensor)
        ]
        requests += [
            comm.Isend([part, byte], peer)
            # strict=False: the tensors to receive into follow those to send.
            for peer, tensor in zip(self._targets, tensors, strict=False)
            for part in mpi_buffers(tensor)
        ]
        return requests


class AllReduceStart:
    """An all-reduce in place over the ranks of a communicator. Call it with the tensor."""

    def __init__(self, comm: MPI.Intracomm, mpi_op: MPI.Op) -> None:
        self._comm, self._mpi_op = comm, mpi_op

    def __call__(self, tensor: torch.Tensor) -> Requests:
        """Start the all-reduce by the MPI call of the eager step: another call may add in another order."""
        kind = mpi_type(tensor.dtype)
        return [self._comm.Iallreduce(MPI.IN_PLACE, [part, kind], self._mpi_op) for part in mpi_buffers(tensor)]


class ChannelStart:
    """Messages or an all-reduce by a channel of process groups.

    Call it with the tensors to send followed by the tensors to receive into, or with the tensor to reduce.

    Parameters
    ----------
    channel : Channel
        The channel.
    what : str
        Description for the watchdog.
    targets, sources : sequence of int
        Peers to send to and to receive from.
    mpi_op : MPI.Op, optional
        The operation of an all-reduce. Default: messages.
    """

    def __init__(
        self, channel: Channel, what: str, targets: Sequence[int] = (), sources: Sequence[int] = (), mpi_op: Any = None
    ) -> None:
        self._channel, self._what, self._targets, self._sources = channel, what, targets, sources
        self._mpi_op = mpi_op

    def __call__(self, *tensors: torch.Tensor) -> ChannelLaunch:
        """Launch the work by the calls of the eager step."""
        if self._mpi_op is not None:
            launch = self._channel.reduce(tensors[0], self._mpi_op, self._what)
        else:
            sends = zip(self._targets, tensors, strict=False)
            receives = zip(self._sources, tensors[len(self._targets) :], strict=True)
            launch = self._channel.exchange([*sends], [*receives], self._what)
        return ChannelLaunch(self._channel, launch, tensors)


class ChannelLaunch(NamedTuple):
    """Work of a channel, and the tensors that it uses, which must stay alive until :func:`wait_for_channel`."""

    channel: Channel
    launch: Launch
    tensors: Sequence[torch.Tensor]


def wait_for_channel(launched: ChannelLaunch, _: Callable[[], str]) -> None:
    """Wait for work of a channel. The channel reports the wait to the watchdog.

    Parameters
    ----------
    launched : ChannelLaunch
        The work.
    _ : callable
        Ignored. The generated code calls :func:`wait_for_requests` and this function with the same arguments.
    """
    launched.channel.join(launched.launch)


def wait_for_requests(requests: Requests, describe: Callable[[], str]) -> None:
    """Wait for MPI requests. The watchdog reports a wait that lasts too long.

    Parameters
    ----------
    requests : list of MPI.Request
        The requests.
    describe : callable
        Returns the description of the wait; it is called only for a report.
    """
    # As watchdog.waiting does. Waits of a replay are not nested, so no outer one has to be restored.
    waits, thread = watchdog.waits, _ident()
    waits[thread] = _now(), describe
    try:
        _wait_all(requests)
    finally:
        del waits[thread]


def raise_on_all_ranks(world: MPI.Intracomm, failure: BaseException | None) -> None:
    """Raise an error on all ranks if any of them has failed. Collective: call on every rank.

    Parameters
    ----------
    world : MPI.Intracomm
        The ranks.
    failure : BaseException or None
        The error of this rank; None if it has not failed.

    Raises
    ------
    NumericalError
        On all ranks, if ``failure`` is not None on any of them.
    """

    def attempt() -> None:
        if failure is not None:
            raise failure

    try_on_all_ranks(world, attempt, NumericalError)
