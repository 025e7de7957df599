"""Copies of parameters and buffers on several ranks: whether they still are the same."""

from __future__ import annotations

import torch
from mpi4py import MPI

from distconv.arrangement import AXES
from distconv.communication.agreement import together
from distconv.communication.digest import difference
from distconv.errors import MismatchError
from distconv.tensor import DistTensor


def check_replicas(model: torch.nn.Module, comm: MPI.Intracomm) -> None:
    """Raise MismatchError unless parameters and buffers are the same, bit for bit, on all ranks that have them.

    Of a sharded parameter that is each block on the ranks that hold it. Training keeps them so: a difference means that
    a rank has computed, received or kept something wrong, from which no error follows. One digest of all parameters
    and a message of 16 bytes for each; collective over ``comm``, the ranks that train the model.

    Raises
    ------
    MismatchError
        On all ranks, naming the first that differs, and the ranks that have each value.
    """
    together(comm, lambda: _check(model, comm), MismatchError)


def _check(model: torch.nn.Module, comm: MPI.Intracomm) -> None:
    groups: dict[int, tuple[MPI.Intracomm, dict[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sharers, block = comm, tensor
        if isinstance(tensor, DistTensor):
            sharers, block = tensor.grid.comm(set(AXES) - set(tensor.dist.split)), tensor.local
        groups.setdefault(sharers.handle, (sharers, {}))[1][name] = block
    # All groups first: a rank that raised would be missing from its next one.
    differences = [difference(*group, comm.rank) for group in groups.values()]
    for text in filter(None, differences):
        raise MismatchError(text)
