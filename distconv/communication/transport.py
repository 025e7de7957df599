"""Transport: nonblocking messages between tensors, and allreduces, on the host or a GPU.

CPU tensors are sent from and received into their own memory. CUDA tensors go as device buffers when MPI is CUDA-aware
and through pinned host memory otherwise; ``DISTCONV_TRANSPORT`` forces one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from distconv.communication.agreement import check_usable
from distconv.precision import widened
from distconv.process import watchdog
from distconv.process.environment import TRANSPORT
from distconv.process.profiling import section

_CHUNK_BYTES = 1 << 30
"""Longer messages are cut: some MPI libraries refuse counts near 2^31."""

_MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.uint8: MPI.UINT8_T,
}

Message = tuple[int, torch.Tensor]
"""Peer rank and a contiguous tensor."""


def cuda_aware() -> bool:
    """Whether device pointers may be handed to MPI: as forced, else as the library's own settings say."""
    forced = TRANSPORT.value()
    if forced is not None:
        return forced
    return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1" or os.environ.get("OMPI_MCA_opal_cuda_support") == "true"


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that MPI may touch in place of ``tensor``: itself on the CPU, a pinned twin for a CUDA tensor."""
    if not tensor.is_cuda or cuda_aware():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _synchronize(tensors: Sequence[torch.Tensor]) -> None:
    # MPI does not see CUDA streams: what it reads must have been written.
    if any(t.is_cuda for t in tensors):
        torch.cuda.current_stream().synchronize()


def _buffers(tensor: torch.Tensor) -> list[MPI.buffer]:
    nbytes = tensor.numel() * tensor.element_size()
    start = tensor.data_ptr()
    return [
        MPI.buffer.fromaddress(start + offset, min(_CHUNK_BYTES, nbytes - offset))
        for offset in range(0, nbytes, _CHUNK_BYTES)
    ]


@dataclass(eq=False)
class Traffic:
    """Bytes that this rank hands to MPI while they are counted, by what they are for. :func:`counted` makes it."""

    sent: Counter[str] = field(default_factory=Counter)
    """Messages to other ranks, by purpose: ``"redistribution"``, ``"halo exchange"``, ..."""
    reduced: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Buffers of allreduces, by purpose and number of ranks; one call counts its buffer once."""


_counting: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count this rank's exchanges and allreduces inside; short agreements between ranks are no data and not counted.

    ::

        with counted() as traffic:
            model(x).sum().backward()
        print(sum(traffic.sent.values()), traffic.reduced)
    """
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


class Exchange:
    """Messages under way between this rank and its peers: posted at construction, complete after ``wait()``."""

    def __init__(self, comm: MPI.Intracomm, sends: Sequence[Message], receives: Sequence[Message], what: str) -> None:
        check_usable(comm, what)
        self._what = what
        for traffic in _counting:
            traffic.sent[what] += sum(tensor.nbytes for _, tensor in sends)
        self._receives = [(peer, tensor, _host(tensor)) for peer, tensor in receives]
        # Device memory that MPI is to write may still be in use by kernels of its last owner.
        _synchronize([buffer for _, _, buffer in self._receives])
        self._requests: list[MPI.Request] = []
        # Receives go first: a send that finds no posted receive is copied once more.
        for peer, _, buffer in self._receives:
            self._requests += [comm.Irecv([part, MPI.BYTE], peer) for part in _buffers(buffer)]
        self._kept = [(peer, self._staged(tensor)) for peer, tensor in sends]
        _synchronize([tensor for _, tensor in sends])
        for peer, buffer in self._kept:
            self._requests += [comm.Isend([part, MPI.BYTE], peer) for part in _buffers(buffer)]

    @staticmethod
    def _staged(tensor: torch.Tensor) -> torch.Tensor:
        host = _host(tensor)
        return tensor if host is tensor else host.copy_(tensor, non_blocking=True)

    def done(self) -> bool:
        """Whether every message has been sent and received; ``wait()`` then returns at once."""
        return bool(MPI.Request.Testall(self._requests))

    def wait(self, what: str | None = None) -> None:
        """Block until every message has been sent and received; ``what`` for, if it was not known at the start."""
        self._what = what or self._what
        with watchdog.waiting(self._describe):
            MPI.Request.Waitall(self._requests)
        for _, tensor, buffer in self._receives:
            if buffer is not tensor:
                tensor.copy_(buffer, non_blocking=True)
        self._kept.clear()

    def cancel(self) -> None:
        """Give up receives that nothing was sent for."""
        for request in self._requests:
            request.Cancel()
        MPI.Request.Waitall(self._requests)

    def _describe(self) -> str:
        peers = sorted({peer for peer, *_ in self._receives} | {peer for peer, _ in self._kept})
        return f"{self._what} with peers {', '.join(map(str, peers))}"


class Reduction:
    """A sum over the ranks of ``comm`` under way: ``tensor`` (contiguous) holds it after ``wait()``."""

    def __init__(self, comm: MPI.Intracomm, tensor: torch.Tensor, what: str, op: MPI.Op = MPI.SUM) -> None:
        check_usable(comm, what)
        self._tensor, self._what, self._size = tensor, what, comm.size
        wide = tensor.to(widened(tensor.dtype))
        self._buffer = Exchange._staged(wide)
        _synchronize([wide])
        for traffic in _counting:
            traffic.reduced[what, comm.size] += self._buffer.nbytes
        mpi_type = _MPI_TYPES[self._buffer.dtype]
        view = MPI.buffer.fromaddress(self._buffer.data_ptr(), self._buffer.numel() * self._buffer.element_size())
        self._request = comm.Iallreduce(MPI.IN_PLACE, [view, mpi_type], op)

    def wait(self) -> torch.Tensor:
        """Block until the sum is there; returns the tensor."""
        with watchdog.waiting(lambda: f"{self._what} over {self._size} ranks"):
            self._request.Wait()
        if self._buffer is not self._tensor:
            self._tensor.copy_(self._buffer)
        return self._tensor


def allreduce(comm: MPI.Intracomm, tensor: torch.Tensor, what: str, op: MPI.Op = MPI.SUM) -> torch.Tensor:
    """Replace ``tensor`` (contiguous) by its sum over the ranks of ``comm``."""
    if comm.size > 1 and tensor.numel():
        with section("allreduce"):
            Reduction(comm, tensor, what, op).wait()
    return tensor
