"""A late GPU whose messages go through pinned host memory, from device memory, or by NCCL."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from mpi4py import MPI

from distconv.communication import nccl
from tests.harness.late_gpu import LateGpu
from tests.harness.late_libraries import LateNccl, late_gpu

TRANSPORTS = ("host", "cuda-aware", "nccl")
CASES = list(itertools.product(TRANSPORTS, LateGpu.ORDERS))


@contextlib.contextmanager
def by(transport: str, order: str, comm: MPI.Intracomm) -> Iterator[tuple[LateGpu, MPI.Intracomm]]:
    """The GPU, and a duplicate of ``comm`` whose ranks send by ``transport``."""
    with pytest.MonkeyPatch.context() as patch, late_gpu(order) as gpu:
        patch.setenv("DISTCONV_TRANSPORT", transport)
        patch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        library = LateNccl(comm)
        patch.setattr(nccl, "_library", lambda: library)
        own = comm.Dup()
        channel = nccl.offer(own, gpu.tensor(torch.zeros(1)))
        assert (channel is not None) == (transport == "nccl" and comm.size > 1)
        yield gpu, own
        gpu.synchronize()
