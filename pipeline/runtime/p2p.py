"""Messages between the ranks of neighbouring stages: tensors of any shapes and dtypes, described by a header.

Each ordered pair of ranks has two streams, one of activations and one of gradients. A receive for each stream is always
posted (the standing receive), as large as the largest message so far. A larger message comes in two parts, the header
first. So shapes may change from message to message, and no message waits for an announcement.

Sender and receiver of a stream compute the size of the standing receive from the headers, both by the same rule. If
they disagreed, messages would no longer match receives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from distconv.communication.gpu import device_transport
from distconv.communication.gpu.staging import copy_from_host
from distconv.communication.routes import Routes
from distconv.communication.transport import Exchange
from distconv.errors import PipelineError
from distconv.grid import ProcessGrid
from distconv.pipeline.schedules.actions import Kind, Message
from distconv.pipeline.stage.resharding import boundary_routes, from_boundary, local_block
from distconv.pipeline.stage.stage_inputs import Minibatch
from distconv.pipeline.stage.structures import Boundary

from .message_header import HEADER_BYTES, MessageHeader, TensorHeader, strides_of
from .placement import StagePlacement, StagePosition

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, so that a message can be read in place."""

POSTED_BYTES = (1 << 30) - HEADER_BYTES
"""Most bytes of tensors in a standing receive.

It must be one message. The transport splits messages longer than 1 GiB, and a shorter message would leave some of
several receives unmatched.
"""


@dataclass(eq=False)
class _SendStream:
    """Stream to one rank."""

    comm: MPI.Intracomm
    peer: int
    capacity: int = 0
    in_flight: list[Exchange] = field(default_factory=list)

    def send(self, header: MessageHeader, payload: torch.Tensor, what: str) -> None:
        """Send ``payload``, which begins with space for the header."""
        # Drop finished sends, which frees their payloads; do not wait for the others.
        self.in_flight = [exchange for exchange in self.in_flight if not exchange.is_done()]
        copy_from_host(header.encode(), payload[:HEADER_BYTES].view(torch.int64))
        parts = [payload]
        # The receiver reads nbytes in the header and enlarges its standing receive in the same way: both must agree.
        if header.nbytes > self.capacity:
            parts = [payload[:HEADER_BYTES], payload[HEADER_BYTES:]]
            self.capacity = min(header.nbytes, POSTED_BYTES)
        self.in_flight.append(Exchange(self.comm, [(self.peer, part) for part in parts], [], what))
        self.in_flight[-1].post()

    def wait(self) -> None:
        while self.in_flight:
            self.in_flight.pop(0).wait()


@dataclass(eq=False)
class _ReceiveStream:
    """Stream from one rank."""

    comm: MPI.Intracomm
    peer: int
    device: torch.device
    capacity: int = 0
    buffer: torch.Tensor = field(init=False)
    posted: Exchange = field(init=False)

    def __post_init__(self) -> None:
        self._post()

    def _post(self) -> None:
        # A new buffer for each message, since received tensors are views of the old one.
        self.buffer = torch.empty(HEADER_BYTES + self.capacity, dtype=torch.uint8, device=self.device)
        self.posted = Exchange(self.comm, [], [(self.peer, self.buffer)], "a message between stages")
        self.posted.post()

    def receive(self, what: str) -> tuple[MessageHeader, torch.Tensor]:
        """Return the next header, and the bytes of its tensors."""
        self.posted.wait(what)
        # Read the header from the host buffer, without waiting for the copy to the GPU.
        (received,) = self.posted.received_buffers
        header = MessageHeader.decode(received[:HEADER_BYTES].view(torch.int64).cpu().tolist())
        payload = self.buffer[HEADER_BYTES:]
        if header.nbytes > self.capacity:  # only the header has arrived; the tensors follow as a message of their own
            payload = torch.empty(header.nbytes, dtype=torch.uint8, device=self.device)
            Exchange(self.comm, [], [(self.peer, payload)], what).wait()
            self.capacity = min(header.nbytes, POSTED_BYTES)
        self._post()
        return header, payload


@dataclass(eq=False)
class _Payload:
    """Tensors of a message, read one after the other.

    They lie in the order in which :meth:`P2P.send` writes them: by boundary tensor, and for each by box of its routes.
    :meth:`next` must be called in the same order.
    """

    memory: torch.Tensor
    end: int = 0

    def next(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        start = _align(self.end)
        tensor = _view(self.memory[start:], dtype, shape, strides)
        self.end = start + tensor.nbytes
        return tensor


class P2P:
    """Messages of one rank to and from the neighbouring stages. Collective: construct on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        All ranks of the pipeline.
    placement : StagePlacement
    position : StagePosition
        Position of this rank.
    grid : ProcessGrid or None
        Grid of this rank's stage; None for one rank.
    device : device
        Device of the tensors.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        placement: StagePlacement,
        position: StagePosition,
        grid: ProcessGrid | None,
        device: torch.device,
    ) -> None:
        # Two communicators, so that a posted receive of activations cannot take a gradient: MPI matches messages by
        # communicator and tag.
        self._comms = {Kind.F: comm.Dup(), Kind.B: comm.Dup()}
        for each in self._comms.values():
            device_transport.choose_mpi(each, device)
        self._rank: int = comm.rank
        self._placement, self._position, self._grid, self._device = placement, position, grid, device
        self._outgoing: dict[tuple[Kind, int], _SendStream] = {}
        self._incoming: dict[tuple[Kind, int], _ReceiveStream] = {}

    def post_receive(self, message: Message, stage: int) -> None:
        """Post the receive for ``message`` from ``stage``, if it is not posted yet.

        Parameters
        ----------
        message : Message
            The message.
        stage : int
            The stage that sends it.
        """
        for rank in self._placement.ranks(stage, message.microbatch):
            if (message.payload, rank) not in self._incoming:
                self._incoming[message.payload, rank] = _ReceiveStream(self._comms[message.payload], rank, self._device)

    def send(
        self,
        message: Message,
        stage: int,
        minibatch: Minibatch,
        boundary: Boundary,
        *,
        loss: float,
        what: str,
    ) -> None:
        """Send boundary tensors to a stage. They may change as soon as the call returns.

        Parameters
        ----------
        message : Message
        stage : int
            Receiving stage.
        minibatch : Minibatch
        boundary : Boundary
            Boundary tensors.
        loss : float
            Loss of the micro-batch.
        what : str
            Description for the watchdog.
        """
        # From one rank to one rank a block is the full tensor and keeps its strides: kernels then give the bits of
        # one process.
        strided = self._placement.grids[self._position.stage].size == self._placement.grids[stage].size == 1
        tensors = tuple(TensorHeader.from_tensor(value, strided) for value in boundary.tensors)
        routed = [
            (value, self._routes(tuple(value.shape), self._position.stage, stage, message.microbatch))
            for value in boundary.tensors
            if value is not None
        ]
        for rank in self._placement.ranks(stage, message.microbatch):
            stream = self._outgoing.setdefault((message.payload, rank), _SendStream(self._comms[message.payload], rank))
            # _assemble() of the receiver reads the blocks in this order: by tensor, then by box.
            blocks = [
                local_block(value).detach()[box.src]
                for value, routes in routed
                for peer in routes.sends
                if peer.rank == rank
                for box in peer.boxes
            ]
            offsets, nbytes = _layout([block.nbytes for block in blocks])
            payload = torch.empty(HEADER_BYTES + nbytes, dtype=torch.uint8, device=self._device)
            for block, offset in zip(blocks, offsets, strict=True):
                strides = strides_of(block) if strided else ()
                _view(payload[HEADER_BYTES + offset :], block.dtype, block.shape, strides).copy_(block)
            header = MessageHeader(message, minibatch, tensors, loss, nbytes, boundary.structure)
            stream.send(header, payload, what)

    def receive(self, message: Message, stage: int, minibatch: Minibatch, what: str) -> tuple[Boundary, float]:
        """Receive boundary tensors from a stage.

        Parameters
        ----------
        message : Message
        stage : int
            Sending stage.
        minibatch : Minibatch
            Mini-batch of this rank, which the message must match.
        what : str
            Description for the watchdog and errors.

        Returns
        -------
        boundary : Boundary
            Boundary tensors on this stage's grid.
        loss : float
            Loss of the micro-batch; valid for gradients only.

        Raises
        ------
        PipelineError
            If another message arrives, as when ranks do different steps or have other samples.
        """
        self.post_receive(message, stage)
        headers, payloads = [], {}
        for rank in self._placement.ranks(stage, message.microbatch):
            header, payload = self._incoming[message.payload, rank].receive(what)
            theirs = header.minibatch
            if (header.message, theirs.step) != (message, minibatch.step):
                raise PipelineError(
                    f"{what} expects it for step {minibatch.step} from rank {rank}, but that sends "
                    f"{header.message.payload} of micro-batch {header.message.microbatch} of step {theirs.step}; all "
                    "ranks must run the same steps"
                )
            if theirs != minibatch:
                raise PipelineError(
                    f"{what}: rank {rank} has a mini-batch of {theirs.describe()}, but this rank has "
                    f"{minibatch.describe()}; pass the same x and target on all ranks"
                )
            headers.append(header)
            payloads[rank] = _Payload(payload)
        first = headers[0]
        if any((header.tensors, header.structure) != (first.tensors, first.structure) for header in headers):
            raise PipelineError(f"{what}: the ranks of stage {stage} send different tensors or other values")
        tensors = [self._assemble(tensor, payloads, stage, message) for tensor in first.tensors]
        return Boundary(tensors, first.structure), first.loss

    def _assemble(
        self, tensor: TensorHeader, payloads: Mapping[int, _Payload], stage: int, message: Message
    ) -> torch.Tensor | None:
        """Return a boundary tensor from the blocks of each sending rank. A tensor from one rank is not copied."""
        if tensor.dtype is None:
            return None
        # Sender and receiver compute the boxes from shapes alone, in the same order, so messages carry no boxes.
        routes = self._routes(tensor.shape, stage, self._position.stage, message.microbatch)
        shape = routes.destination_shapes[0]
        block: torch.Tensor | None = None
        for peer in routes.receives:
            for box in peer.boxes:
                sent = payloads[peer.rank].next(tensor.dtype, box.extents, tensor.strides)
                if box.extents == shape:
                    # Used in place: the next posted receive has a new buffer.
                    block = sent
                else:
                    block = self._empty(tensor.dtype, shape) if block is None else block
                    block[box.dst] = sent
        block = self._empty(tensor.dtype, shape) if block is None else block
        return from_boundary(block, tensor.shape, self._grid)

    def _empty(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _routes(self, shape: tuple[int, ...], source: int, target: int, microbatch: int) -> Routes:
        grids, ranks = self._placement.grids, self._placement.ranks
        return boundary_routes(
            grids[source],
            grids[target],
            shape,
            self._rank,
            sources=ranks(source, microbatch),
            targets=ranks(target, microbatch),
        )

    def flush(self) -> None:
        """Wait until all messages are sent."""
        for stream in self._outgoing.values():
            stream.wait()

    def close(self) -> None:
        """Wait until all messages are sent, and cancel the posted receives. Collective: call on every rank."""
        self.flush()
        for stream in self._incoming.values():
            stream.posted.cancel()
        self._incoming.clear()
        for comm in self._comms.values():
            comm.Free()
        self._comms.clear()


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of tensors of these sizes in a message, and its length."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(_align(end))
        end = offsets[-1] + size
    return offsets, end


def _view(memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] = ()) -> torch.Tensor:
    """Return the first bytes of ``memory`` as a tensor, contiguous without ``strides``."""
    flat = memory[: math.prod(shape) * dtype.itemsize].view(dtype)
    return flat.as_strided(shape, strides) if strides else flat.view(shape)
