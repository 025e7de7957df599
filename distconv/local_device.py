"""The GPU of this rank. ``ProcessGrid`` sets the local rank; :func:`device` returns the GPU."""

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
"""Environment variables in which launchers number the ranks of a node.

Slurm's comes last: ``mpiexec`` in a batch script passes the value 0 of the batch step to all ranks.
"""

_local_rank: int | None = None


def set_local_rank(node: MPI.Comm) -> None:
    """Set this rank's number on its node, unless it is set.

    Collective: call on every rank of ``node``.

    Parameters
    ----------
    node : MPI.Comm
        The ranks of one node, which share memory.
    """
    global _local_rank
    # Also on a rank whose number is set: another rank of the node may have none, and waits in the allgather.
    number = choose_local_rank(node.allgather(launcher_local_ranks()), node.rank)
    _local_rank = number if _local_rank is None else _local_rank


def launcher_local_ranks() -> tuple[str, ...]:
    """Return the value of each variable of ``_VARIABLES``; an empty string if it is not set."""
    return tuple(os.environ.get(name, "") for name in _VARIABLES)


def choose_local_rank(given: Sequence[tuple[str, ...]], rank: int) -> int:
    """Return the number of a rank on its node.

    The number of the launcher is preferred, because the launcher may have bound cores by it. It is valid if it differs
    between the ranks of the node. A rank that is alone on its node, such as in its own container, cannot check that.

    Parameters
    ----------
    given : sequence of tuple of str
        What :func:`launcher_local_ranks` returned on each rank of the node.
    rank : int
        The rank in the communicator of the node.

    Returns
    -------
    int
        The launcher's number, or ``rank``.
    """
    # A variable counts only if it gives the ranks of this node different numbers.
    for values in zip(*given, strict=True):
        if all(value.isdecimal() for value in values) and len(set(values)) == len(values):
            return int(values[rank])
    return rank


@functools.cache
def device() -> torch.device:
    """Return the GPU of this rank and make it torch's current device.

    The GPUs that a node's ranks see are assigned to them round-robin: one each if there are enough, otherwise ranks
    share GPUs. If each rank sees only one GPU (``CUDA_VISIBLE_DEVICES``, ``srun --gpus-per-task=1``), that is
    ``cuda:0``. Not collective: before the first grid, the launcher determines a rank's number on its node.

    Returns
    -------
    torch.device
        The GPU, or ``torch.device("cpu")`` if there is none. The same in every call.

    Raises
    ------
    LaunchError
        Before the first grid, if there are several GPUs and the launcher does not number the ranks of a node.

    Examples
    --------
    ::

        device = dc.device()                  # once, before the first tensor on a GPU
        model = Net().to(device)              # from here on .cuda() is the same
        x = dc.scatter(images.to(device), grid)
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Fewer GPUs than ranks: ranks share them.
    chosen = torch.device("cuda", _find_local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def _find_local_rank() -> int:
    """Return this rank's number on its node."""
    if _local_rank is not None:
        return _local_rank
    given = launcher_local_ranks()
    is_one_of_many = MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1
    if is_one_of_many and torch.cuda.device_count() > 1 and not any(map(str.isdecimal, given)):
        raise LaunchError(
            f"device: the launcher does not number the ranks of a node (none of {', '.join(_VARIABLES)} is set), so "
            "before the first grid this rank has no GPU of its own. Make the ProcessGrid first."
        )
    return choose_local_rank([given], 0)
