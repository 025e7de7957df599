"""Tensors of the CPU whose messages and sums go as those of GPUs go by NCCL: gloo is what moves them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from mpi4py import MPI

from distconv.communication.gpu import device_transport, nccl
from distconv.communication.gpu.nccl import Channel
from tests.distconv.communication.late_transports import forget_channels


@contextlib.contextmanager
def by_gloo(comm: MPI.Intracomm) -> Iterator[tuple[Channel, MPI.Intracomm]]:
    """The channel, and the duplicate of ``comm`` whose ranks have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTCONV_TRANSPORT", "nccl")
        patch.setattr(device_transport, "_on_gpu", lambda tensor: True)
        patch.setattr(device_transport, "missing", lambda comm, device: "")
        own = comm.Dup()
        channel = device_transport.offer(own, torch.zeros(1)).channel
        assert channel is not None
        assert channel.name == "gloo"
        try:
            yield channel, own
        except BaseException:
            forget_channels()
            raise
        for each in nccl.channels():
            each.close()
