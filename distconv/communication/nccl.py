"""NCCL: messages and sums between GPUs that no host waits for.

A :class:`Channel` runs what it is given one after the other, on a stream of its own, so all its ranks have to launch in
one order. The ranks of a process grid do; the stages of a pipeline do not, and their messages go through MPI.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distconv.communication import staging
from distconv.communication.agreement import together
from distconv.communication.derived import Derived
from distconv.errors import CommunicatorError
from distconv.process import watchdog
from distconv.process.environment import TRANSPORT

_PROBE_BYTES, _PROBES = 1 << 20, 5
"""Messages by which NCCL is compared with MPI: a halo of a large layer."""

_TYPES = {
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
    torch.uint8: "NCCL_UINT8",
}
_OPERATIONS = (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN)
"""Reductions in the order of NCCL's numbers for them."""

Message = tuple[int, torch.Tensor]
"""Peer rank and a contiguous tensor."""


@functools.cache
def _library() -> Any:
    """CuPy's binding of NCCL; None without them."""
    try:
        from cupy.cuda import nccl  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return nccl if nccl.available and torch.cuda.is_available() else None


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_under_way: deque[tuple[float, torch.cuda.Event, str]] = deque()
"""When it was launched, the end of it, what it is for: what was not over yet at the last launch, oldest first."""


def _waited_for() -> Iterator[tuple[float, Callable[[], str]]]:
    """What the watchdog is to know: since when the GPU has had the oldest work that is not over."""
    for since, event, what in list(_under_way):
        if not event.query():
            yield since, lambda: f"{what} (by NCCL)"  # noqa: B023  (at most one is asked for)
            return


class Channel:
    """An NCCL communicator over the ranks of ``comm``, for tensors of ``device``. Making one is collective.

    Raises
    ------
    CommunicatorError
        On all ranks, with what NCCL says on one of them.
    """

    def __init__(self, comm: MPI.Intracomm, device: torch.device) -> None:
        library = _library()
        self._device = device
        with torch.cuda.device(device), watchdog.waiting(lambda: f"making an NCCL communicator of {comm.size} ranks"):
            own = together(comm, lambda: library.get_unique_id() if comm.rank == 0 else None, CommunicatorError)
            identifier = comm.bcast(own)
            made = functools.partial(library.NcclCommunicator, comm.size, identifier, comm.rank)
            self._comm = together(comm, made, CommunicatorError)
        watchdog.look_at(_waited_for)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> torch.cuda.Event:
        """Launch messages that all go at once; the event is their end. Keep the tensors until then."""

        def messages(stream: int) -> None:
            library = _library()
            library.groupStart()
            try:
                for act, each in ((self._comm.send, sends), (self._comm.recv, receives)):
                    for peer, tensor in each:
                        if tensor.nbytes:
                            act(tensor.data_ptr(), tensor.nbytes, library.NCCL_UINT8, peer, stream)
            finally:
                library.groupEnd()

        return self._launched(messages, what)

    def reduce(self, tensor: torch.Tensor, op: MPI.Op, what: str) -> torch.cuda.Event:
        """Launch the reduction of ``tensor`` (contiguous) in place; the event is its end."""
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        start, count, kind = values.data_ptr(), values.numel(), getattr(_library(), _TYPES[values.dtype])
        return self._launched(lambda s: self._comm.allReduce(start, start, count, kind, _OPERATIONS.index(op), s), what)

    def _launched(self, work: Callable[[int], object], what: str) -> torch.cuda.Event:
        stream = _stream(self._device)
        # What is sent has been written, and what is received into is no longer read, by then.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        work(stream.cuda_stream)
        event: torch.cuda.Event = stream.record_event()
        while _under_way and _under_way[0][1].query():
            _under_way.popleft()
        _under_way.append((time.monotonic(), event, what))
        return event

    def join(self, event: torch.cuda.Event) -> None:
        """Make what is launched from here on wait for ``event``; the host does not.

        Raises
        ------
        CommunicatorError
            If a peer was lost.
        """
        try:
            self._comm.check_async_error()
        except _library().NcclError as error:
            raise CommunicatorError(f"NCCL: {error}") from None
        torch.cuda.current_stream(self._device).wait_event(event)


def of(comm: MPI.Intracomm, tensor: torch.Tensor) -> Channel | None:
    """The channel that ``comm`` and its duplicates have for ``tensor``, if they were offered one and took it."""
    return Derived.of(comm).channel if tensor.is_cuda else None


def offer(comm: MPI.Intracomm, tensor: torch.Tensor) -> Channel | None:
    """As :func:`of`, but at the first tensor of a GPU decide: a channel if it can be made and is faster. Collective.

    Raises
    ------
    CommunicatorError
        On all ranks, if NCCL is forced and cannot be had.
    """
    if not tensor.is_cuda:
        return None
    derived = Derived.of(comm)
    if not derived.offered:
        derived.offered = True
        derived.channel = _chosen(comm, tensor.device) if comm.size > 1 else None
    return derived.channel


def _chosen(comm: MPI.Intracomm, device: torch.device) -> Channel | None:
    forced = TRANSPORT.value()
    if forced not in (None, "nccl"):
        return None
    reason = missing(comm, device)
    if reason:
        if forced:
            raise CommunicatorError(f"{TRANSPORT.name}=nccl: {reason}; set {TRANSPORT.name}=host")
        return None
    try:
        channel = Channel(comm, device)
    except CommunicatorError as error:
        if forced:
            raise CommunicatorError(f"{TRANSPORT.name}=nccl: {error}; set {TRANSPORT.name}=host") from None
        if comm.rank == 0:
            warnings.warn(f"messages between GPUs go through MPI, as NCCL says: {error}", stacklevel=2)
        return None
    return channel if forced or _faster(channel, comm, device) else None


def missing(comm: MPI.Intracomm, device: torch.device) -> str:
    """Why the ranks of ``comm`` can have no channel; empty if they can. Collective."""
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    gpu = comm.rank if shared else str(torch.cuda.get_device_properties(device).uuid)
    found = comm.allgather((_library() is not None, gpu))
    without = [rank for rank, (has_library, _) in enumerate(found) if not has_library]
    if without:
        return f"there is no CuPy with NCCL on rank {without[0]} (pip install cupy-cuda12x or cupy-cuda13x)"
    if len({gpu for _, gpu in found}) < comm.size:
        return f"{comm.size} ranks share {len({gpu for _, gpu in found})} GPUs, and NCCL needs one for each"
    return ""


def _faster(channel: Channel, comm: MPI.Intracomm, device: torch.device) -> bool:
    """Whether a ring of messages takes less time by ``channel`` than by MPI, on the slowest rank. Collective."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received = torch.zeros(2, _PROBE_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.zeros(2, _PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    direct = staging.cuda_aware()

    def by_nccl() -> None:
        channel.join(channel.exchange([(after, sent)], [(before, received)], "a probe"))

    def by_mpi() -> None:
        out, into = (sent, received) if direct else (on_host[0].copy_(sent), on_host[1])
        views = [MPI.buffer.fromaddress(t.data_ptr(), t.nbytes) for t in (out, into)]
        comm.Sendrecv([views[0], MPI.BYTE], after, recvbuf=[views[1], MPI.BYTE], source=before)
        received.copy_(into)

    def seconds(ring: Callable[[], None]) -> float:
        ring()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_PROBES):
            ring()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    times = np.array([seconds(by_nccl), seconds(by_mpi)])
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return bool(times[0] < times[1])
