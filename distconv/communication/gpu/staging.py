"""Staging: copies of GPU tensors to and from the memory that MPI uses.

MPI does not use CUDA streams, so the host must wait until the GPU has written what MPI sends. If MPI does not accept
device memory, tensors go through pinned host memory. Two streams, one for each direction, overlap the copies with
kernels and with each other. torch caches pinned memory, so it is not allocated in each step.

Order of calls: ``prepare_receive`` and ``prepare_send`` for each tensor, ``record_copies``, ``wait_until_written``, the
calls of MPI, ``deliver`` for each tensor, ``close``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch


class Staging:
    """Staging of the tensors of one exchange or reduction.

    Parameters
    ----------
    device : torch.device
        Their GPU.
    direct : bool
        MPI accepts device memory, so nothing is copied. Otherwise MPI gets pinned host memory.
    """

    def __init__(self, device: torch.device, direct: bool) -> None:
        self._device, self.direct = device, direct
        self._out, self._in = _copy_streams(device)
        # The current stream writes the tensors to send, and may still read the tensors to receive into.
        for stream in (self._out, self._in):
            stream.wait_stream(torch.cuda.current_stream(device))

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], direct: bool) -> Staging | None:
        """Return the staging for the tensors' GPU, or None on the CPU, where MPI uses the tensors' own memory.

        Parameters
        ----------
        tensors : sequence of Tensor
            Tensors of one device.
        direct : bool
            True if MPI reads and writes GPU memory itself.

        Returns
        -------
        Staging or None
        """
        return next((Staging(tensor.device, direct) for tensor in tensors if tensor.is_cuda), None)

    def prepare_receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for MPI to receive the values of ``tensor`` into."""
        # Pinned: a copy from or to pageable memory would not be asynchronous.
        return tensor if self.direct else torch.empty_like(tensor, device="cpu", pin_memory=True)

    def prepare_send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy ``tensor`` to memory that MPI can send; return this memory. Keep ``tensor`` until then."""
        if self.direct:
            return tensor
        with torch.cuda.stream(self._out):
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def record_copies(self) -> None:
        """Record the end of the outgoing copies, for which ``wait_until_written`` waits."""
        self._written = self._out.record_event()

    def wait_until_written(self) -> None:
        """Block until MPI may use the memory. Work that was launched later continues on the GPU."""
        self._written.synchronize()

    def deliver(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy the received values from ``buffer``, if it is not ``tensor`` itself.

        Parameters
        ----------
        tensor : Tensor
            Tensor on the GPU.
        buffer : Tensor
            Result of :meth:`prepare_receive` for it.
        """
        if buffer is not tensor:
            with torch.cuda.stream(self._in):
                tensor.copy_(buffer, non_blocking=True)

    def close(self) -> None:
        """Make kernels that are launched from now on wait for the delivered values."""
        torch.cuda.current_stream(self._device).wait_stream(self._in)


def copy_from_host(values: torch.Tensor, into: torch.Tensor) -> None:
    """Copy values from the host to a tensor, without waiting for a GPU.

    Parameters
    ----------
    values : Tensor
        On the CPU.
    into : Tensor
        On any device; changed in place.
    """
    if into.is_cuda:
        values = torch.empty_like(values, pin_memory=True).copy_(values)
    into.copy_(values, non_blocking=True)


@functools.cache
def _copy_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams of copies to the host and from it."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
