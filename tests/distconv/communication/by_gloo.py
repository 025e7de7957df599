"""Tensors of the CPU whose messages and sums go as those of GPUs go by NCCL: by gloo, as if it had been asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from mpi4py import MPI

from distconv.communication.gpu import device_transport, nccl
from distconv.communication.gpu.nccl import Channel
from tests.distconv.communication.late_transports import since


@contextlib.contextmanager
def by_gloo(comm: MPI.Intracomm) -> Iterator[tuple[Channel, MPI.Intracomm]]:
    """The channel, and the duplicate of ``comm`` whose ranks have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTCONV_TRANSPORT", "torch")
        patch.setattr(device_transport, "needs_process_groups", lambda: True)
        before, own = nccl.open_channels(), comm.Dup()
        channel = device_transport.choose_transport(own, torch.zeros(1)).channel
        assert channel is not None
        assert channel.name == "gloo"
        try:
            yield channel, own
        except BaseException:
            for each in since(before):
                each._groups.clear()  # the other ranks may not be there
            raise
        for each in since(before):
            each.close()
