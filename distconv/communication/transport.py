"""Transport: nonblocking messages between tensors, and allreduces, on the host or a GPU.

CPU tensors are sent from and received into their own memory; those of a GPU go as :mod:`.gpu.device_transport` decided:
through NCCL (:mod:`.gpu.nccl`), or through MPI from their memory or by way of the host's (:mod:`.gpu.staging`). Where
torch's process groups are asked for, those of the CPU go by gloo as those of a GPU by NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from distconv import recording
from distconv.communication.agreement import check_communicator, check_order
from distconv.communication.gpu import device_transport, nccl
from distconv.communication.gpu.staging import Staging
from distconv.communication.packing import in_memory
from distconv.precision import accumulation_dtype
from distconv.process import watchdog
from distconv.process.profiling import section

_CHUNK_BYTES = 1 << 30
"""Longer messages are cut: some MPI libraries refuse counts near 2^31."""

_MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.uint8: MPI.UINT8_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}

Message = nccl.Message


def mpi_type(dtype: torch.dtype) -> MPI.Datatype:
    """What MPI calls it, which sums it; KeyError if it cannot."""
    return _MPI_TYPES[dtype]


def buffers(tensor: torch.Tensor) -> list[MPI.buffer]:
    """The memory of a contiguous tensor, cut where it is long."""
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
    """Messages under way between this rank and its peers: posted at construction, complete after ``wait()``.

    Those from a GPU go out at ``wait()``, or at ``post()`` before it: MPI cannot send what the GPU has not written yet,
    and meanwhile this rank has work to launch. By NCCL they go out at once, and ``wait()`` lets the GPU wait alone.
    """

    _staging: Staging | None = None
    _launch: nccl.Launch | None = None

    def __init__(self, comm: MPI.Intracomm, sends: Sequence[Message], receives: Sequence[Message], what: str) -> None:
        self._requests: list[MPI.Request] = []
        check_communicator(comm, what)
        _abandoned[:] = [exchange for exchange in _abandoned if not exchange.done()]
        self._comm, self._what = comm, what
        sends = [(peer, in_memory(tensor)) for peer, tensor in sends]
        for traffic in _counting:
            traffic.sent[what] += sum(tensor.nbytes for _, tensor in sends)
        self._receives, self._sends = [(*each, each[1]) for each in receives], [(*each, each[1]) for each in sends]
        tensors = [tensor for _, tensor in (*sends, *receives)]
        way = device_transport.of(comm, tensors[0]) if tensors else device_transport.HOST
        self._channel = way.channel
        if recording.active is not None:
            recording.active.record_exchange(self, comm, sends, receives, what, channel=self._channel)
        if self._channel is not None:
            self._launch = self._channel.exchange(sends, receives, what)
            return
        self._staging = staging = Staging.of(tensors, way.by_mpi.messages)
        if staging is not None:
            self._receives = [(peer, tensor, staging.incoming(tensor)) for peer, tensor in receives]
            self._sends = [(peer, tensor, staging.outgoing(tensor)) for peer, tensor in sends]
            staging.sealed()
        if not self._late:
            self._receive()
        _unposted.append(self)
        if staging is None:
            self.post()

    @property
    def _late(self) -> bool:
        """Whether even receives have to wait: kernels may still use the memory that MPI would write."""
        return self._staging is not None and self._staging.direct

    def _receive(self) -> None:
        # Receives go first: a send that finds no posted receive is copied once more.
        with section("post"):
            for peer, _, buffer in self._receives:
                self._requests += [self._comm.Irecv([part, MPI.BYTE], peer) for part in buffers(buffer)]

    def post(self) -> None:
        """Hand the messages to MPI, and before them any that are still to be: they arrive in the order they were made.

        On a GPU blocks until it has written them, and no longer uses what MPI is to write.
        """
        while self in _unposted:
            _unposted.pop(0)._post()

    def _post(self) -> None:
        if self._staging is not None and (self._sends or self._late):
            self._staging.wait_until_written()
        if self._late:
            self._receive()
        with section("post"):
            for peer, _, buffer in self._sends:
                self._requests += [self._comm.Isend([part, MPI.BYTE], peer) for part in buffers(buffer)]

    def done(self) -> bool:
        """Whether every message has been sent and received; ``wait()`` then returns at once."""
        self.post()
        return self._launch.over() if self._launch is not None else bool(MPI.Request.Testall(self._requests))

    def wait(self, what: str | None = None) -> None:
        """Block until every message has been sent and received; ``what`` for, if it was not known at the start."""
        self._what = what or self._what
        if recording.active is not None:
            recording.active.record_wait(self)
        if self._channel is not None and self._launch is not None:
            self._channel.join(self._launch)
            self._launch = None
            self._sends.clear()
            return
        self.post()
        with watchdog.waiting(self._describe):
            MPI.Request.Waitall(self._requests)
        self._requests.clear()
        if self._staging is not None:
            for _, tensor, buffer in self._receives:
                self._staging.deliver(tensor, buffer)
            self._staging.close()
        self._sends.clear()

    @property
    def received(self) -> list[torch.Tensor]:
        """What came, once it is waited for, where MPI wrote it: of a GPU's tensors perhaps on the host."""
        return [buffer for *_, buffer in self._receives]

    def cancel(self) -> None:
        """Give up receives that nothing was sent for."""
        self.post()
        for request in self._requests:
            request.Cancel()
        MPI.Request.Waitall(self._requests)
        self._requests.clear()

    def __del__(self) -> None:
        # An exception came between start and finish: MPI may still read and write this memory.
        if self._requests or self._launch is not None:
            _abandoned.append(self)

    def _describe(self) -> str:
        peers = sorted({peer for peer, *_ in (*self._receives, *self._sends)})
        return f"{self._what} with peers {', '.join(map(str, peers))}"


_abandoned: list[Exchange] = []
"""Those that nobody waits for any more; their messages arrive all the same, since their peers have posted them, too."""

_unposted: list[Exchange] = []
"""In the order of their construction: two ranks' messages to each other are told apart by nothing else."""


class Reduction:
    """A sum over the ranks of ``comm`` under way: ``tensor`` (contiguous) holds it after ``wait()``."""

    def __init__(self, comm: MPI.Intracomm, tensor: torch.Tensor, what: str, op: MPI.Op = MPI.SUM) -> None:
        check_communicator(comm, what)
        self._tensor, self._what, self._size = tensor, what, comm.size
        self._wide = in_memory(tensor.to(accumulation_dtype(tensor.dtype)))
        for traffic in _counting:
            traffic.reduced[what, comm.size] += self._wide.nbytes
        way = device_transport.offer(comm, self._wide)
        # Torch reduces complex numbers as pairs of real ones, which are no factors.
        self._channel = way.channel if op == MPI.SUM or not self._wide.is_complex() else None
        if recording.active is not None:
            recording.active.record_reduction(self, comm, self._wide, op, what, channel=self._channel)
        if self._channel is not None:
            self._launch = self._channel.reduce(self._wide, op, what)
            return
        self._buffer = self._wide
        self._staging = staging = Staging.of([tensor], way.by_mpi.sums)
        if staging is not None:
            self._buffer = staging.outgoing(self._wide)
            staging.sealed()
            staging.wait_until_written()
        kind = mpi_type(self._buffer.dtype)
        self._requests = [comm.Iallreduce(MPI.IN_PLACE, [part, kind], op) for part in buffers(self._buffer)]

    def wait(self) -> torch.Tensor:
        """Block until the sum is there; returns the tensor."""
        if recording.active is not None:
            recording.active.record_wait(self)
        if self._channel is not None:
            self._channel.join(self._launch)
        else:
            with watchdog.waiting(lambda: f"{self._what} over {self._size} ranks"):
                MPI.Request.Waitall(self._requests)
            if self._staging is not None:
                self._staging.deliver(self._wide, self._buffer)
                self._staging.close()
        if self._wide is not self._tensor:
            self._tensor.copy_(self._wide)
        for each in (self._wide, self._tensor):
            if each.is_cuda:
                # Made on the stream of a backward pass, perhaps, and read on that of its caller.
                each.record_stream(torch.cuda.current_stream(each.device))
        return self._tensor


def allreduce(comm: MPI.Intracomm, tensor: torch.Tensor, what: str, op: MPI.Op = MPI.SUM) -> torch.Tensor:
    """Replace ``tensor`` (contiguous) by its sum over the ranks of ``comm``."""
    if comm.size > 1 and tensor.numel():
        check_order(comm, what)
        with section("allreduce"):
            Reduction(comm, tensor, what, op).wait()
    return tensor
