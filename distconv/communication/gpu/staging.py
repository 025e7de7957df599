"""Staging: tensors of a GPU on their way to and from MPI, which sees no streams.

Where MPI takes no device memory they go through pinned host memory. The copies run on streams of their own, one each
way, so that kernels launched meanwhile run beside them, and a copy out beside one in; torch keeps pinned blocks, so
that none is made anew at each step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch


class Staging:
    """Tensors of one GPU that cross together, ``direct`` if MPI is handed their own memory.

    ``outgoing`` and ``incoming`` give the memory that MPI is to use; it may once ``wait_until_written`` has returned.
    """

    def __init__(self, device: torch.device, direct: bool) -> None:
        self._device, self.direct = device, direct
        self._out, self._in = _copying(device)
        # What is sent has been written, and what is received into is no longer read, by then.
        for stream in (self._out, self._in):
            stream.wait_stream(torch.cuda.current_stream(device))

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], direct: bool) -> Staging | None:
        """That of the tensors' GPU; None on the CPU, where MPI uses the tensors' own memory."""
        return next((Staging(tensor.device, direct) for tensor in tensors if tensor.is_cuda), None)

    def incoming(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory to receive into, for ``tensor``."""
        return tensor if self.direct else torch.empty_like(tensor, device="cpu", pin_memory=True)

    def outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that will hold what ``tensor`` holds; keep ``tensor`` until it is written."""
        if self.direct:
            return tensor
        with torch.cuda.stream(self._out):
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def record_copies(self) -> None:
        """Mark where the outgoing copies end: what ``wait_until_written`` waits for."""
        self._written = self._out.record_event()

    def wait_until_written(self) -> None:
        """Block until MPI may use the memory. The GPU goes on with whatever else it was given."""
        self._written.synchronize()

    def deliver(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        """Put what was received into ``buffer`` into ``tensor``."""
        if buffer is not tensor:
            with torch.cuda.stream(self._in):
                tensor.copy_(buffer, non_blocking=True)

    def close(self) -> None:
        """Make kernels launched from here on wait for what was delivered."""
        torch.cuda.current_stream(self._device).wait_stream(self._in)


def copy_from_host(values: torch.Tensor, into: torch.Tensor) -> None:
    """Copy ``values`` of the host to ``into``; the host does not wait for a GPU."""
    if into.is_cuda:
        values = torch.empty_like(values, pin_memory=True).copy_(values)
    into.copy_(values, non_blocking=True)


@functools.cache
def _copying(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of copies out and in."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
