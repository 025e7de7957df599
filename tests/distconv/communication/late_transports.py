"""A late GPU whose messages go through pinned host memory, from device memory, or by NCCL."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from mpi4py import MPI

from distconv.communication.gpu import device_transport, nccl
from tests.harness.late_gpu import LateGpu
from tests.harness.late_libraries import LateGroup, late_gpu

TRANSPORTS = ("host", "cuda-aware", "nccl")
CASES = list(itertools.product(TRANSPORTS, LateGpu.ORDERS))


@contextlib.contextmanager
def by(transport: str, order: str, comm: MPI.Intracomm) -> Iterator[tuple[LateGpu, MPI.Intracomm]]:
    """The GPU, and a duplicate of ``comm`` whose ranks send by ``transport``."""
    with pytest.MonkeyPatch.context() as patch, late_gpu(order) as gpu:
        patch.setenv("DISTCONV_TRANSPORT", transport)
        patch.setattr(device_transport, "needs_process_groups", lambda: False)
        patch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        patch.setattr(nccl, "is_available", lambda: True)
        groups = late_groups(comm)
        patch.setattr(nccl, "_group", lambda store, name, comm, device: next(groups))
        before, own = nccl.open_channels(), comm.Dup()
        chosen = device_transport.choose_transport(own, gpu.tensor(torch.zeros(1)))
        assert (chosen.channel is not None) == (transport == "nccl" and comm.size > 1)
        assert chosen.mpi_support.messages == (transport == "cuda-aware" and comm.size > 1)
        del chosen
        try:
            yield gpu, own
            gpu.synchronize()
        except BaseException:
            for channel in since(before):
                channel._groups.clear()  # the other ranks may not be there
            raise
        for channel in since(before):
            channel.close()


def since(before: list[nccl.Channel]) -> list[nccl.Channel]:
    """The channels that were not there ``before``."""
    return [channel for channel in nccl.open_channels() if channel not in before]


def late_groups(comm: MPI.Intracomm) -> Iterator[LateGroup]:
    """Process groups over ``comm``, as many as a test may need. Collective."""
    return iter([LateGroup(comm.Dup()) for _ in range(8)])
