"""Test of whether MPI accepts device memory (is "CUDA-aware").

The MPI library reports it, and :func:`probe_mpi_support` then sends a message to confirm it: a library without support
does not always fail, but may deliver other values.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import torch
from mpi4py import MPI

from distconv.communication.agreement import allreduce_max
from distconv.errors import CommunicatorError
from distconv.process import watchdog
from distconv.process.environment import TRANSPORT

PROBE_BYTES = 4 << 20
"""Size of the probe message: too large for any library to send it eagerly, before the receiver is ready."""

_TAKE_SUMS = ("MPICH", "MVAPICH")
"""Names, in their version strings, of libraries whose nonblocking collectives accept device memory.

According to Open MPI's manual its collectives do not, and a trial may end the process.
"""


class MpiSupport(NamedTuple):
    """Operations for which MPI accepts device memory."""

    messages: bool = False
    """True for messages between ranks. Otherwise they go through host memory."""
    sums: bool = False
    """True for all-reduces. Otherwise they go through host memory."""


def probe_mpi_support(comm: MPI.Intracomm, device: torch.device) -> MpiSupport:
    """Test for which operations MPI accepts device memory. Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    device : torch.device
        This rank's GPU.

    Returns
    -------
    MpiSupport
        Identical on all ranks. Nothing is supported if the library does not report support on each rank, unless
        ``DISTCONV_TRANSPORT=cuda-aware`` forces it.

    Raises
    ------
    CommunicatorError
        On every rank, if support was reported or forced, but a probe did not arrive on one of them.
    """
    forced = TRANSPORT.value() == "cuda-aware"
    wanted = comm.size > 1 and TRANSPORT.value() != "host" and (forced or is_reported_cuda_aware())
    # If one rank goes through the host, all do: which transports are tried must be the same on all ranks.
    if allreduce_max(comm, int(not wanted), "agreement on what MPI takes of a GPU"):
        return MpiSupport()
    sums = any(name in MPI.Get_library_version() for name in _TAKE_SUMS)
    # Messages first. A trial of sums may end the process, so only libraries that are known to sum are tried.
    for arrive in (_messages_arrive, _sums_arrive)[: 1 + sums]:
        with watchdog.waiting(lambda: "a trial of MPI with memory of GPUs"):
            lost = not arrive(comm, device)
        if allreduce_max(comm, int(lost), "agreement on what arrived from GPUs"):
            raise CommunicatorError(
                f"MPI does not transfer device memory correctly, although {TRANSPORT.name if forced else 'it'} claims "
                f"support. Set {TRANSPORT.name}=host"
            )
    return MpiSupport(True, sums)


def is_reported_cuda_aware() -> bool:
    """Return True if the MPI library reports that it is CUDA-aware."""
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return True
    try:
        # Python loads mpi4py, and with it MPI, with RTLD_LOCAL: the symbols are reachable through its own handle only.
        library = ctypes.CDLL(MPI.__file__, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return bool(library.MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False


def device_buffer(tensor: torch.Tensor) -> MPI.buffer:
    """Return the memory of a contiguous tensor as a buffer for MPI."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _messages_arrive(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Send a message around a ring and return True if it arrived with its values."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    numbers = torch.arange(PROBE_BYTES // 8, device=device)
    sent, received = numbers + comm.rank, torch.zeros_like(numbers)
    # MPI does not use CUDA streams: what it reads must have been written, and what it writes must not be in use.
    torch.cuda.current_stream(device).synchronize()
    requests = [
        comm.Irecv([device_buffer(received), MPI.BYTE], before),
        comm.Isend([device_buffer(sent), MPI.BYTE], after),
    ]
    MPI.Request.Waitall(requests)
    return torch.equal(received, numbers + before)


def _sums_arrive(comm: MPI.Intracomm, device: torch.device) -> bool:
    """All-reduce device memory and return True if the sum is right."""
    numbers = torch.arange(PROBE_BYTES // 8, device=device)
    total = numbers + comm.rank
    torch.cuda.current_stream(device).synchronize()
    comm.Iallreduce(MPI.IN_PLACE, [device_buffer(total), MPI.INT64_T]).Wait()
    return torch.equal(total, comm.size * numbers + comm.size * (comm.size - 1) // 2)
