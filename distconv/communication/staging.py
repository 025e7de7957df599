"""Staging: tensors of a GPU on their way to and from MPI, which sees no streams.

Without a CUDA-aware MPI they go through pinned host memory. The copies run on a stream of their own, so that kernels
launched meanwhile run beside them; torch keeps pinned blocks, so that none is made anew at each step.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

import torch
from mpi4py import MPI

from distconv.errors import CommunicatorError
from distconv.process.environment import TRANSPORT


class Staging:
    """Tensors of one GPU that cross together, ``direct`` if MPI takes device memory.

    ``outgoing`` and ``incoming`` give the memory that MPI is to use; it may once ``wait_until_written`` has returned.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _copying(device)
        self.direct = cuda_aware()
        # What is sent has been written, and what is received into is no longer read, by then.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Staging | None:
        """That of the tensors' GPU; None on the CPU, where MPI uses the tensors' own memory."""
        return next((Staging(tensor.device) for tensor in tensors if tensor.is_cuda), None)

    def incoming(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory to receive into, for ``tensor``."""
        return tensor if self.direct else torch.empty_like(tensor, device="cpu", pin_memory=True)

    def outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that will hold what ``tensor`` holds; keep ``tensor`` until it is written."""
        if self.direct:
            return tensor
        with torch.cuda.stream(self._stream):
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def sealed(self) -> None:
        """Mark where the outgoing copies end: what ``wait_until_written`` waits for."""
        self._written = self._stream.record_event()

    def wait_until_written(self) -> None:
        """Block until MPI may use the memory. The GPU goes on with whatever else it was given."""
        self._written.synchronize()

    def deliver(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        """Put what was received into ``buffer`` into ``tensor``."""
        if buffer is not tensor:
            with torch.cuda.stream(self._stream):
                tensor.copy_(buffer, non_blocking=True)

    def close(self) -> None:
        """Make kernels launched from here on wait for what was delivered."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def cuda_aware() -> bool:
    """Whether device pointers may be handed to MPI: as forced, else as the library says, and then only if they arrive.

    Raises
    ------
    CommunicatorError
        If it is forced, and a message to this very rank does not arrive.
    """
    forced = TRANSPORT.value() == "cuda-aware"
    if TRANSPORT.value() == "host" or not torch.cuda.is_available() or not (forced or _claimed()):
        return False
    if not _arrives():
        raise CommunicatorError(
            f"MPI does not carry device memory, though {TRANSPORT.name if forced else 'it'} says so; set "
            f"{TRANSPORT.name}=host"
        )
    return True


def _claimed() -> bool:
    """Whether the MPI library says that it is CUDA-aware."""
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1" or os.environ.get("OMPI_MCA_opal_cuda_support") == "true":
        return True
    try:
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except AttributeError:
        return False


def _arrives() -> bool:
    sent = torch.arange(8, dtype=torch.uint8, device="cuda")
    received = torch.zeros_like(sent)
    torch.cuda.current_stream().synchronize()
    view = [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes) for tensor in (sent, received)]
    MPI.COMM_SELF.Sendrecv([view[0], MPI.BYTE], 0, recvbuf=[view[1], MPI.BYTE], source=0)
    return torch.equal(sent, received)
