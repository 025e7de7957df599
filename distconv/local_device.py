"""The GPU of this rank."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
from mpi4py import MPI

from distconv.errors import LaunchError

_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
)
"""In which launchers number the ranks of a node. Slurm's is last: ``mpiexec`` in a batch script passes its 0 to all."""

_local_rank: int | None = None


def number_on(node: MPI.Comm) -> None:
    """Find this rank's number among those of ``node``, which share memory, unless it has one. Collective."""
    global _local_rank
    number = local_number(node.allgather(launchers_numbers()), node.rank)
    _local_rank = number if _local_rank is None else _local_rank


def launchers_numbers() -> tuple[str, ...]:
    """What the launchers say of this rank."""
    return tuple(os.environ.get(name, "") for name in _VARIABLES)


def local_number(given: Sequence[tuple[str, ...]], place: int) -> int:
    """The number of rank ``place`` among those of a node, of which launchers say what is ``given``.

    That of a launcher, by which it may have bound cores, if it gave each rank one; else ``place``. A rank that sees no
    other one, as in a container of its own, takes the launcher's word.
    """
    for values in zip(*given, strict=True):
        if all(value.isdecimal() for value in values) and len(set(values)) == len(values):
            return int(values[place])
    return place


@functools.cache
def device() -> torch.device:
    """The GPU of this rank, made torch's current one; ``torch.device("cpu")`` where there is none.

    The ranks of a node take the GPUs that they see in turn: one each where there are as many; more ranks than GPUs
    share them. Where each rank sees one alone (``CUDA_VISIBLE_DEVICES``, ``srun --gpus-per-task=1``) it is ``cuda:0``.
    Communicates nothing: before the first grid a rank's number on its node is the launcher's.

    ::

        device = dc.device()                  # once, before the first tensor on a GPU
        model = Net().to(device)              # from here on .cuda() is the same
        x = dc.scatter(images.to(device), grid)

    Raises
    ------
    LaunchError
        Before the first grid, if there are several GPUs and the launcher does not number the ranks of a node.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    chosen = torch.device("cuda", _number() % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def _number() -> int:
    if _local_rank is not None:
        return _local_rank
    given = launchers_numbers()
    is_one_of_many = MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1
    if is_one_of_many and torch.cuda.device_count() > 1 and not any(map(str.isdecimal, given)):
        raise LaunchError(
            f"device: the launcher does not number the ranks of a node (none of {', '.join(_VARIABLES)} is set), so "
            "before the first grid this rank has no GPU of its own. Make the ProcessGrid first."
        )
    return local_number([given], 0)
