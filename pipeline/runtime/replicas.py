"""Gradient sums and exchange of records between the replicas of a stage.

Gradients are added in the order of the replicas, so that the sum does not depend on the MPI library.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from distconv.communication.transport import Exchange
from distconv.pipeline.stage.running_statistics import StatisticsRecord
from distconv.pipeline.stage.stage_inputs import Minibatch
from distconv.process import watchdog

T = TypeVar("T")


class ReplicaRecord(NamedTuple):
    """Data that a replica sends to the others before an update.

    Attributes
    ----------
    records : list of StatisticsRecord
    losses : dict of int to float
        By micro-batch.
    has_gradients : list of bool
        True for each parameter with a gradient. Otherwise False.
    minibatches : dict of int to Minibatch
        Mini-batches that the replica works on, by their step.
    """

    records: list[StatisticsRecord]
    losses: dict[int, float]
    has_gradients: list[bool]
    minibatches: dict[int, Minibatch]


def allgather_replicas(comm: MPI.Intracomm, mine: T, what: str) -> list[T]:
    """Return the value of every replica, in order. Collective: call on every rank of ``comm``.

    Parameters
    ----------
    comm : MPI.Intracomm
        Replicas of the stage.
    mine : object
        Picklable value of this replica.
    what : str
        Description for the watchdog.

    Returns
    -------
    list
    """
    # torch pickles each tensor as an archive, which takes 0.2 ms: too long for the statistics of every batch norm.
    # float64 contains the values of the floating-point types of statistics exactly.
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {torch.Tensor: lambda tensor: (_tensor, (tensor.double().cpu().numpy(), tensor.dtype))}
    pickler.dump(mine)
    with watchdog.waiting(lambda: what):
        return [pickle.loads(each) for each in comm.allgather(buffer.getvalue())]


# A function of the module, because pickle stores it by its name.
def _tensor(values: npt.NDArray[np.float64], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values).to(dtype)


def has_gradients(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each parameter if it has a gradient."""
    return [parameter.grad is not None for parameter in parameters]


def sum_gradients(
    comm: MPI.Intracomm, parameters: Sequence[torch.Tensor], present: Sequence[Sequence[bool]], divisor: int, what: str
) -> None:
    """Replace ``.grad`` on every replica by the sum over all replicas, divided by a number.

    The gradients are divided into one block for each replica. A replica adds the contributions to its block, that of
    replica 0 first, and sends the sum to the others. So each replica sends 2 (p - 1) / p of the gradients, as in a
    ring. A gradient that only some replicas have counts as zero on the others; one that no replica has stays None.
    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    comm : MPI.Intracomm
        Replicas of the stage.
    parameters : sequence of Tensor
    present : sequence of sequence of bool
        :func:`has_gradients` of each replica.
    divisor : int
    what : str
        Description for the watchdog.
    """
    # All replicas take the same parameters, and the dtypes in the same order (a set would not have one), so that their
    # messages match.
    wanted = [p for p, *has in zip(parameters, *present, strict=True) if any(has)]
    for dtype in dict.fromkeys(parameter.dtype for parameter in wanted):
        grads = []
        for parameter in (p for p in wanted if p.dtype is dtype):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
        total = _ordered_sum(comm, torch.cat([grad.reshape(-1) for grad in grads]), what)
        if divisor != 1:
            total /= divisor
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view(grad.shape))


def _ordered_sum(comm: MPI.Intracomm, flat: torch.Tensor, what: str) -> torch.Tensor:
    """Return the sum over all ranks, rank 0 first: the same bits with any MPI library. Collective.

    ::

        [1]  send block k to rank k, which receives block k of every rank
        [2]  add the contributions to the own block, that of rank 0 first
        [3]  send the sum of the own block to all others, and receive theirs
    """
    parts = list(flat.tensor_split(comm.size))
    mine = parts[comm.rank]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    theirs = {rank: torch.empty_like(mine) for rank in others}
    _exchange(comm, {rank: parts[rank] for rank in others}, theirs, what)  # [1]
    terms = [mine if rank == comm.rank else theirs[rank] for rank in range(comm.size)]
    total = terms[0].clone()  # [2]
    for term in terms[1:]:
        total += term
    summed = torch.empty_like(flat)
    summed_parts = list(summed.tensor_split(comm.size))
    summed_parts[comm.rank].copy_(total)
    # [3] The received blocks are written into ``summed``, of which they are views.
    _exchange(comm, dict.fromkeys(others, total), {rank: summed_parts[rank] for rank in others}, what)
    return summed


def _exchange(
    comm: MPI.Intracomm, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], what: str
) -> None:
    Exchange(comm, list(sends.items()), list(receives.items()), what).wait()
