"""Transport: nonblocking messages between tensors, and all-reduces, for tensors on the host or a GPU.

Tensors on the CPU are sent from and received into their own memory. Tensors on a GPU take the path that
:mod:`.gpu.device_transport` has chosen: through NCCL (:mod:`.gpu.nccl`), or through MPI from device memory or from
pinned host memory (:mod:`.gpu.staging`). With ``DISTCONV_TRANSPORT=torch``, tensors on the CPU go through gloo.

Messages have no tags. Two ranks match the messages between them by their order alone, so every rank must start its
exchanges over a communicator in the same order; :func:`.agreement.check_order` compares it.
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
from distconv.communication.packing import materialize
from distconv.precision import accumulation_dtype
from distconv.process import watchdog
from distconv.process.profiling import section

_CHUNK_BYTES = 1 << 30
"""Size above which messages are split: some MPI libraries reject counts near 2^31."""

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
    """Return the MPI datatype of a dtype that MPI can sum.

    Parameters
    ----------
    dtype : torch.dtype
        The dtype.

    Returns
    -------
    MPI.Datatype
        A predefined datatype of MPI.

    Raises
    ------
    KeyError
        If MPI cannot sum it.
    """
    return _MPI_TYPES[dtype]


def mpi_buffers(tensor: torch.Tensor) -> list[MPI.buffer]:
    """Return the memory of a contiguous tensor as buffers for MPI.

    Parameters
    ----------
    tensor : Tensor
        Contiguous; keep it as long as MPI uses the buffers.

    Returns
    -------
    list of MPI.buffer
        Several for a large tensor, none for an empty one.
    """
    # By address: mpi4py rejects the buffer of a tensor that requires a gradient.
    nbytes = tensor.numel() * tensor.element_size()
    start = tensor.data_ptr()
    return [
        MPI.buffer.fromaddress(start + offset, min(_CHUNK_BYTES, nbytes - offset))
        for offset in range(0, nbytes, _CHUNK_BYTES)
    ]


@dataclass(eq=False)
class Traffic:
    """Bytes that this rank passes to MPI within :func:`count_traffic`, by operation."""

    sent: Counter[str] = field(default_factory=Counter)
    """Messages to other ranks, by operation: ``"redistribution"``, ``"halo exchange"``, ..."""
    reduced: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Buffers of all-reduces, by operation and number of ranks; one call counts its buffer once."""


_counting: list[Traffic] = []
"""One entry for each :func:`count_traffic` block that is being executed."""


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count this rank's exchanges and all-reduces in a ``with`` block; comparisons between ranks are left out.

    ::

        with count_traffic() as traffic:
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
    """Messages in flight between this rank and its peers: started at construction, complete after ``wait()``.

    Messages from a GPU through MPI are sent at ``wait()``, or at ``post()`` before it: the GPU must have written them,
    and in the meantime this rank launches other work. Through NCCL they are sent at once, and in ``wait()`` the GPU
    waits and not the host.

    Parameters
    ----------
    comm : MPI.Intracomm
        The communicator.
    sends, receives : sequence of (int, Tensor)
        Peer ranks, and contiguous tensors to send and to receive into. Do not change them before ``wait()`` returns.
    what : str
        The operation, for errors, traffic counts and the watchdog's report.

    Raises
    ------
    CommunicatorError
        If MPI is not running, or ``comm`` was freed.
    """

    _receive_requests = 0
    """Number of requests of receives, the first ones of ``_requests``."""
    _staging: Staging | None = None
    _launch: nccl.Launch | None = None

    def __init__(self, comm: MPI.Intracomm, sends: Sequence[Message], receives: Sequence[Message], what: str) -> None:
        self._requests: list[MPI.Request] = []
        check_communicator(comm, what)
        # MPI still used the memory of exchanges that failed. It is freed once their messages are complete.
        _abandoned[:] = [exchange for exchange in _abandoned if not exchange.is_done()]
        self._comm, self._what = comm, what
        # Kept until wait(): nothing else refers to a tensor that was materialized.
        sends = [(peer, materialize(tensor)) for peer, tensor in sends]
        for traffic in _counting:
            traffic.sent[what] += sum(tensor.nbytes for _, tensor in sends)
        # Triples of a peer, a tensor, and the memory that MPI uses for it: the tensor itself unless it is staged.
        self._receives, self._sends = [(*each, each[1]) for each in receives], [(*each, each[1]) for each in sends]
        tensors = [tensor for _, tensor in (*sends, *receives)]
        # One path for all messages of the exchange, since its tensors are on one device.
        transport = device_transport.get_transport(comm, tensors[0]) if tensors else device_transport.HOST
        self._channel = transport.channel
        # Before the paths divide: a replay must send these messages on either path.
        if recording.active is not None:
            recording.active.record_exchange(self, comm, sends, receives, what, channel=self._channel)
        if self._channel is not None:
            self._launch = self._channel.exchange(sends, receives, what)
            return
        self._staging = staging = Staging.of(tensors, transport.mpi_support.messages)
        if staging is not None:
            self._receives = [(peer, tensor, staging.prepare_receive(tensor)) for peer, tensor in receives]
            self._sends = [(peer, tensor, staging.prepare_send(tensor)) for peer, tensor in sends]
            staging.record_copies()
        if not self._posts_receives_late:
            self._post_receives()
        _unposted.append(self)
        # On a GPU the copies to the host may still run, and post() blocks until they are complete. So it follows in
        # wait().
        if staging is None:
            self.post()

    @property
    def _posts_receives_late(self) -> bool:
        """True if receives must wait, too, since kernels may still use the memory that MPI writes to."""
        return self._staging is not None and self._staging.direct

    def _post_receives(self) -> None:
        # Receives go first: a send that finds no posted receive is copied once more.
        with section("post"):
            for peer, _, buffer in self._receives:
                self._requests += [self._comm.Irecv([part, MPI.BYTE], peer) for part in mpi_buffers(buffer)]
        self._receive_requests = len(self._requests)

    def post(self) -> None:
        """Pass the messages to MPI, after those of all exchanges that were made earlier.

        Blocks until the GPU has written the tensors to send, and no longer uses the tensors to receive into.
        """
        # Peers match messages by their order, so exchanges must be posted in the order in which they were made.
        while self in _unposted:
            _unposted.pop(0)._post()

    def _post(self) -> None:
        # A rank that only receives into host memory does not wait for the GPU.
        if self._staging is not None and (self._sends or self._posts_receives_late):
            self._staging.wait_until_written()
        if self._posts_receives_late:
            self._post_receives()
        with section("post"):
            for peer, _, buffer in self._sends:
                self._requests += [self._comm.Isend([part, MPI.BYTE], peer) for part in mpi_buffers(buffer)]

    def is_done(self) -> bool:
        """Return True if every message has been sent and received; ``wait()`` then returns at once."""
        self.post()
        return self._launch.is_done() if self._launch is not None else bool(MPI.Request.Testall(self._requests))

    def wait(self, what: str | None = None) -> None:
        """Block until every message has been sent and received.

        Parameters
        ----------
        what : str, optional
            The operation, if it was not known at the start.
        """
        self._what = what or self._what
        if recording.active is not None:
            recording.active.record_wait(self)
        if self._channel is not None and self._launch is not None:
            self._channel.join(self._launch)
            # Kernels that are launched later run after the messages, so the memory may be used again.
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
        # Only now: until the requests are complete MPI reads this memory.
        self._sends.clear()

    def wait_received(self) -> bool:
        """Block until every message has been received.

        A rank that is ahead then does not wait until its peers have received.

        Returns
        -------
        bool
            True if the exchange is complete. Otherwise call ``wait()`` before the tensors to send are changed.
        """
        if recording.active is not None or self._channel is not None or self._staging is not None:
            self.wait()  # recorded and GPU waits are for the whole exchange
            return True
        self.post()
        with watchdog.waiting(self._describe):
            MPI.Request.Waitall(self._requests[: self._receive_requests])
        del self._requests[: self._receive_requests]
        self._receive_requests = 0
        return not self._requests

    @property
    def received_buffers(self) -> list[torch.Tensor]:
        """The memory that MPI has written, after ``wait()``: for tensors on a GPU it may be on the host."""
        return [buffer for *_, buffer in self._receives]

    def cancel(self) -> None:
        """Cancel receives for which no peer sends a message, and wait for their end."""
        self.post()
        for request in self._requests:
            request.Cancel()
        MPI.Request.Waitall(self._requests)
        self._requests.clear()

    def __del__(self) -> None:
        # An exception was raised between start and wait: MPI may still read and write this memory.
        if self._requests or self._launch is not None:
            _abandoned.append(self)

    def _describe(self) -> str:
        peers = sorted({peer for peer, *_ in (*self._receives, *self._sends)})
        return f"{self._what} with peers {', '.join(map(str, peers))}"


_abandoned: list[Exchange] = []
"""Exchanges that no code waits for. They complete nevertheless, since the peers have posted their side."""

_unposted: list[Exchange] = []
"""Exchanges to be posted, in the order of their construction, by which the peers match messages."""


class Reduction:
    """An all-reduce in flight. Collective: make it on every rank, in the same order.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks to sum over.
    tensor : Tensor
        This rank's values, contiguous. Holds the sum after ``wait()``; do not use it before.
    what : str
        The operation, for errors, traffic counts and the watchdog's report.
    op : MPI.Op
        The reduction.

    Raises
    ------
    CommunicatorError
        If MPI is not running, or ``comm`` was freed.
    """

    def __init__(self, comm: MPI.Intracomm, tensor: torch.Tensor, what: str, op: MPI.Op = MPI.SUM) -> None:
        check_communicator(comm, what)
        self._tensor, self._what, self._size = tensor, what, comm.size
        # In the dtype in which sums are accumulated: half precision is summed in float32, and rounded in wait().
        self._wide = materialize(tensor.to(accumulation_dtype(tensor.dtype)))
        for traffic in _counting:
            traffic.reduced[what, comm.size] += self._wide.nbytes
        transport = device_transport.choose_transport(comm, self._wide)
        # Process groups reduce complex numbers as pairs of real ones, which is right for sums only.
        self._channel = transport.channel if op == MPI.SUM or not self._wide.is_complex() else None
        if recording.active is not None:
            recording.active.record_reduction(self, comm, self._wide, op, what, channel=self._channel)
        if self._channel is not None:
            self._launch = self._channel.reduce(self._wide, op, what)
            return
        self._buffer = self._wide
        self._staging = staging = Staging.of([tensor], transport.mpi_support.sums)
        if staging is not None:
            self._buffer = staging.prepare_send(self._wide)
            # Not postponed as messages are: MPI matches collectives by the order of the calls, and other collectives
            # follow.
            staging.record_copies()
            staging.wait_until_written()
        kind = mpi_type(self._buffer.dtype)
        self._requests = [comm.Iallreduce(MPI.IN_PLACE, [part, kind], op) for part in mpi_buffers(self._buffer)]

    def wait(self) -> torch.Tensor:
        """Block until the all-reduce is complete, and return the tensor."""
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
        # Half precision: rounded once, from the complete sum.
        if self._wide is not self._tensor:
            self._tensor.copy_(self._wide)
        for each in (self._wide, self._tensor):
            if each.is_cuda:
                # It may have been allocated on the stream of a backward pass, and be read on the caller's.
                each.record_stream(torch.cuda.current_stream(each.device))
        return self._tensor


def allreduce(comm: MPI.Intracomm, tensor: torch.Tensor, what: str, op: MPI.Op = MPI.SUM) -> torch.Tensor:
    """Replace a tensor by its sum over the ranks. Collective: call on every rank.

    Parameters
    ----------
    comm, tensor, what, op
        As in :class:`Reduction`. An empty tensor, and a communicator of one rank, are left alone.

    Returns
    -------
    Tensor
        ``tensor``.

    Raises
    ------
    MismatchError
        On every rank, if the ranks are at different operations (:func:`.agreement.check_order`).
    """
    if comm.size > 1 and tensor.numel():
        check_order(comm, what)
        with section("allreduce"):
            Reduction(comm, tensor, what, op).wait()
    return tensor
