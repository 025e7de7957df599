"""Choice of the transport of GPU tensors: made once for each communicator, by all of its ranks.

``DISTCONV_TRANSPORT`` forces one. Otherwise it is NCCL if each rank has a GPU of its own and NCCL is faster than MPI in
a trial. If not, it is MPI: from device memory if MPI accepts that, or through pinned host memory. CPU tensors go
through MPI, or with ``DISTCONV_TRANSPORT=torch`` through gloo.

The choice is collective, but messages are not. So :func:`choose_transport` is called where tensors enter a process grid
and for all-reduces, and :func:`get_transport`, which does not communicate, for messages.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from distconv import local_device
from distconv.communication.agreement import check_communicator
from distconv.communication.derived import CommunicatorRegistry
from distconv.communication.gpu import nccl
from distconv.communication.gpu.cuda_aware import MpiSupport, device_buffer, probe_mpi_support
from distconv.communication.gpu.nccl import Channel
from distconv.communication.gpu.rendezvous import dist
from distconv.errors import CommunicatorError
from distconv.process.environment import TRANSPORT

_PROBE_BYTES, _PROBES = 1 << 20, 5
"""Size in bytes and number of the messages with which NCCL is compared with MPI: the halo of a large layer."""


class DeviceTransport(NamedTuple):
    """A chosen transport."""

    channel: Channel | None = None
    """Process groups that carry the messages. None: MPI does."""
    mpi_support: MpiSupport = MpiSupport()
    """Operations for which MPI gets device memory, if there is no channel."""


class Transports(dict[str, DeviceTransport]):
    """The transport for each device type, of a communicator and all of its duplicates."""


HOST = DeviceTransport()
"""MPI from host memory."""


def get_transport(comm: MPI.Intracomm, tensor: torch.Tensor) -> DeviceTransport:
    """Return the transport that was chosen; MPI from host memory if none was. Not collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The communicator or one of its duplicates.
    tensor : Tensor
        A tensor to send, receive or reduce.

    Returns
    -------
    DeviceTransport
        For the tensor's device type.

    Raises
    ------
    CommunicatorError
        On this rank, if its channel is for another GPU than that of ``tensor``.
    """
    if not _has_choice(tensor):
        return HOST
    transport = CommunicatorRegistry.get(comm).get_attached(Transports).get(tensor.device.type, HOST)
    if transport.channel is not None and transport.channel.device != tensor.device:
        raise CommunicatorError(
            f"a tensor on {tensor.device}, but rank {comm.rank} sends by {transport.channel.name} from "
            f"{transport.channel.device}, where its first tensor was; keep all of a rank's tensors on one GPU, "
            "dc.device()"
        )
    return transport


def choose_transport(comm: MPI.Intracomm, tensor: torch.Tensor) -> DeviceTransport:
    """Return the transport; choose it at the first tensor of a device type. Collective at its first use.

    Parameters
    ----------
    comm, tensor
        As in :func:`get_transport`.

    Returns
    -------
    DeviceTransport
        Identical on all ranks.

    Raises
    ------
    CommunicatorError
        On every rank, if NCCL or gloo is forced and not available, or MPI does not carry device memory as it reports.
    """
    if not _has_choice(tensor):
        return HOST
    transports, device = CommunicatorRegistry.get(comm).get_attached(Transports), tensor.device
    # By device type, which is the same on all ranks; the numbers of their GPUs are not.
    if device.type not in transports:
        transports[device.type] = _choose(comm, device) if comm.size > 1 else HOST
    return get_transport(comm, tensor)


def connect_process_groups(comm: MPI.Intracomm) -> None:
    """Connect the process groups before the first step, if ``DISTCONV_TRANSPORT=torch``. Collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks to connect.

    Raises
    ------
    CommunicatorError
        On every rank, if they are not available.
    """
    if needs_process_groups():
        for device in {torch.device("cpu"), local_device.device()}:
            choose_transport(comm, torch.empty(0, device=device))


def choose_mpi(comm: MPI.Intracomm, device: torch.device) -> None:
    """Choose MPI for a communicator whose ranks send messages in no common order, as NCCL requires. Collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks, such as those of the stages of a pipeline.
    device : torch.device
        This rank's device.

    Raises
    ------
    CommunicatorError
        On every rank, if MPI does not carry device memory as it reports.
    """
    if device.type == "cuda":
        CommunicatorRegistry.get(comm).get_attached(Transports)[device.type] = DeviceTransport(
            None, probe_mpi_support(comm, device)
        )


@functools.cache
def needs_process_groups() -> bool:
    """Return True if all tensors must go through torch's process groups (``DISTCONV_TRANSPORT=torch``)."""
    return TRANSPORT.value() == "torch"


def _has_choice(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or needs_process_groups()


def _forced() -> bool:
    """Return True if process groups are forced, so that their absence is an error."""
    return needs_process_groups() or TRANSPORT.value() == "nccl"


def _choose(comm: MPI.Intracomm, device: torch.device) -> DeviceTransport:
    by_mpi = probe_mpi_support(comm, device) if device.type == "cuda" else MpiSupport()
    if TRANSPORT.value() is not None and not _forced():
        return DeviceTransport(None, by_mpi)
    # The support of MPI is kept in any case: complex maxima, for example, do not go through a channel.
    return DeviceTransport(_channel(comm, device, by_mpi), by_mpi)


def _channel(comm: MPI.Intracomm, device: torch.device, by_mpi: MpiSupport) -> Channel | None:
    forced, asked = _forced(), f"{TRANSPORT.name}={TRANSPORT.value()}"
    reason = describe_missing(comm, device)
    if reason:
        if forced:
            raise CommunicatorError(f"{asked}: {reason}; set {TRANSPORT.name}=host")
        return None
    try:
        channel = Channel(comm, device)
    except CommunicatorError as error:
        if forced:
            raise CommunicatorError(f"{asked}: {error}; set {TRANSPORT.name}=host") from None
        if comm.rank == 0:
            warnings.warn(f"messages between GPUs use MPI, because NCCL failed: {error}", stacklevel=2)
        return None
    return channel if forced or _is_faster(channel, comm, device, by_mpi) else None


def describe_missing(comm: MPI.Intracomm, device: torch.device) -> str:
    """Return the reason why ranks cannot use process groups; empty if they can. Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    device : torch.device
        This rank's device.

    Returns
    -------
    str
        The reason, identical on all ranks.
    """
    check_communicator(comm, "process groups")
    if device.type == "cpu":
        gloo = comm.allgather(dist.is_available() and dist.is_gloo_available())
        return "" if all(gloo) else f"torch on rank {gloo.index(False)} has no gloo"
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    # The UUID: visible devices may be numbered from 0 on every rank.
    gpu = comm.rank if shared else str(torch.cuda.get_device_properties(device).uuid)
    libraries = comm.allgather((nccl.is_available(), gpu))
    without = [rank for rank, (has_library, _) in enumerate(libraries) if not has_library]
    if without:
        return f"torch on rank {without[0]} has no NCCL (2.6 or newer, built for CUDA)"
    if len({gpu for _, gpu in libraries}) < comm.size:
        return f"{comm.size} ranks share {len({gpu for _, gpu in libraries})} GPUs, and NCCL needs one for each"
    return ""


def _is_faster(channel: Channel, comm: MPI.Intracomm, device: torch.device, by_mpi: MpiSupport) -> bool:
    """Return True if a ring of messages is faster through ``channel`` than through MPI, on the slowest rank."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received = torch.zeros(2, _PROBE_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.zeros(2, _PROBE_BYTES, dtype=torch.uint8, pin_memory=True)

    def ring_by_nccl() -> None:
        channel.join(channel.exchange([(after, sent)], [(before, received)], "a probe"))

    def ring_by_mpi() -> None:
        out, into = (sent, received) if by_mpi.messages else (on_host[0].copy_(sent), on_host[1])
        comm.Sendrecv([device_buffer(out), MPI.BYTE], after, recvbuf=[device_buffer(into), MPI.BYTE], source=before)
        received.copy_(into)

    def seconds(ring: Callable[[], None]) -> float:
        # Not timed: connections are made, and memory is pinned, at the first message.
        ring()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_PROBES):
            ring()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    times = np.array([seconds(ring_by_nccl), seconds(ring_by_mpi)])
    # By the slowest rank, so that all ranks choose the same transport.
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return bool(times[0] < times[1])
