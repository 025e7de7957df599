"""What of a GPU's memory MPI takes: asked of the library, then tried, by all ranks of a communicator together."""

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
"""Of a message that no library sends along with its announcement."""

_TAKE_SUMS = ("MPICH", "MVAPICH")
"""Libraries whose nonblocking collectives take device memory, by their versions' texts. Open MPI's manual says that its
own do not, and to try it may end the process."""


class MpiSupport(NamedTuple):
    """For what MPI is handed memory of a GPU."""

    messages: bool = False
    sums: bool = False


def probe_mpi_support(comm: MPI.Intracomm, device: torch.device) -> MpiSupport:
    """What MPI takes of ``device`` between the ranks of ``comm``: as forced or as it says, if that arrives. Collective.

    Raises
    ------
    CommunicatorError
        On all ranks, if a message or a sum does not arrive on one of them.
    """
    forced = TRANSPORT.value() == "cuda-aware"
    wanted = comm.size > 1 and TRANSPORT.value() != "host" and (forced or is_reported_cuda_aware())
    if allreduce_max(comm, int(not wanted), "agreement on what MPI takes of a GPU"):
        return MpiSupport()
    sums = any(name in MPI.Get_library_version() for name in _TAKE_SUMS)
    for arrive in (_messages_arrive, _sums_arrive)[: 1 + sums]:
        with watchdog.waiting(lambda: "a trial of MPI with memory of GPUs"):
            lost = not arrive(comm, device)
        if allreduce_max(comm, int(lost), "agreement on what arrived from GPUs"):
            raise CommunicatorError(
                f"MPI does not carry device memory, though {TRANSPORT.name if forced else 'it'} says so; set "
                f"{TRANSPORT.name}=host"
            )
    return MpiSupport(True, sums)


def is_reported_cuda_aware() -> bool:
    """Whether the MPI library says that it is CUDA-aware."""
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return True
    try:
        # Python loads mpi4py for itself alone (RTLD_LOCAL), and with it MPI: only its own handle reaches that.
        library = ctypes.CDLL(MPI.__file__, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return bool(library.MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False


def device_buffer(tensor: torch.Tensor) -> MPI.buffer:
    """What MPI is handed for ``tensor``, which is contiguous."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _messages_arrive(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Whether a message to the next rank does, and what it holds."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    numbers = torch.arange(PROBE_BYTES // 8, device=device)
    sent, received = numbers + comm.rank, torch.zeros_like(numbers)
    torch.cuda.current_stream(device).synchronize()
    requests = [
        comm.Irecv([device_buffer(received), MPI.BYTE], before),
        comm.Isend([device_buffer(sent), MPI.BYTE], after),
    ]
    MPI.Request.Waitall(requests)
    return torch.equal(received, numbers + before)


def _sums_arrive(comm: MPI.Intracomm, device: torch.device) -> bool:
    numbers = torch.arange(PROBE_BYTES // 8, device=device)
    total = numbers + comm.rank
    torch.cuda.current_stream(device).synchronize()
    comm.Iallreduce(MPI.IN_PLACE, [device_buffer(total), MPI.INT64_T]).Wait()
    return torch.equal(total, comm.size * numbers + comm.size * (comm.size - 1) // 2)
