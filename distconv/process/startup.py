"""The start of distconv in a process: everything that has an effect on the process happens here.

Importing distconv only defines things, so a job may have ranks that never import it. The first
:class:`~distconv.ProcessGrid` starts distconv on the ranks of its communicator, and a command on all of its job.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
from mpi4py import MPI

from distconv import local_device
from distconv.errors import ReplicationWarning
from distconv.process import endings, environment, launchers, patches, stuck_ranks, watchdog
from distconv.process.memory import allocator


def _cores() -> frozenset[int]:
    """Return the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def threads_for(mine: frozenset[int], everyone: Sequence[frozenset[int]]) -> int:
    """Threads for a rank that may use the cores ``mine`` on a node whose ranks may use those in ``everyone``.

    A rank bound to cores of its own gets them all; ranks that share cores divide them.

    >>> threads_for(frozenset({0, 1}), [frozenset({0, 1}), frozenset({2, 3})])
    2
    >>> threads_for(frozenset({0, 1}), [frozenset({0, 1}), frozenset({0, 1})])
    1
    """
    return max(1, len(mine) // sum(bool(mine & other) for other in everyone))


_ranks = 0
"""Ranks of the largest communicator that this process has started with."""


def start(comm: MPI.Intracomm) -> None:
    """Start distconv on the ranks of ``comm``. Collective: call on every rank of ``comm``.

    Does nothing where one earlier start was over all of these ranks. The page "What starting does" of the documentation
    lists the steps.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that start together. A job may have others, which are left alone.

    Raises
    ------
    LaunchError
        On all processes, if the launcher started several and MPI has one rank in each.
    EnvironmentVariableError
        On all ranks of ``comm``, if a variable of any of them is bad or differs.
    """
    global _ranks
    launchers.check_ranks(MPI.COMM_WORLD.size, MPI.get_vendor()[0])  # [1]
    # In the threads that torch's backward pass takes for GPUs, nodes have no order that all ranks share.
    torch.autograd.set_multithreading_enabled(False)
    if endings.are_watched(comm) or (comm.size == 1 and _ranks):
        return
    with watchdog.waiting(lambda: f"the start of distconv on {comm.size} ranks"):
        environment.check(comm)  # [2]
    if comm.size > 1:
        _divide_node(comm)  # [3] and [4]
    if not _ranks:
        allocator.keep_memory(MPI.COMM_WORLD.size)  # [5]
    patches.apply()  # [6]
    endings.install()  # [7]
    if comm.size > 1:
        endings.coordinate(comm)  # [8] and [9]
        if comm.rank and _ranks < 2:
            # All ranks give the same warnings. Appended, so that filters of the user, which may raise, come first.
            warnings.simplefilter("ignore", ReplicationWarning, append=True)
    _ranks = max(_ranks, comm.size)


def _divide_node(comm: MPI.Intracomm) -> None:
    """Divide the cores and the GPUs of a node among its ranks; their processes are noted for reports."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = node.allgather(_cores())
    if "OMP_NUM_THREADS" not in os.environ and _ranks < 2:
        torch.set_num_threads(threads_for(_cores(), cores))
    local_device.set_local_rank(node)
    stuck_ranks.processes.update(node.allgather((MPI.COMM_WORLD.rank, os.getpid())))
    node.Free()
