"""The start of a process, at its first grid: launch, variables, memory, threads, its GPU, exits.

Importing distconv communicates nothing, so a job may have ranks that never import it. The first
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
from distconv.process import command_start, endings, environment, stuck_ranks, watchdog
from distconv.process.memory import allocator


def _cores() -> frozenset[int]:
    """Cores this process may run on."""
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


_memory_kept = _alone = _together = False


def start(comm: MPI.Intracomm) -> None:
    """Start distconv on the ranks of ``comm``. Collective over ``comm``.

    Does nothing where one earlier start was over all of these ranks. Otherwise they compare their environment variables
    and coordinate their exits from then on. Threads, memory and the number of the GPU are set by a rank's first start
    with others.

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
    global _alone, _together
    command_start.check_launch()
    if endings.are_watched(comm) or (comm.size == 1 and (_alone or _together)):
        return
    with watchdog.waiting(lambda: f"the start of distconv on {comm.size} ranks"):
        environment.check(comm)
    keep_memory()
    channel = endings.watch(comm)
    if channel is not None and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        stuck_ranks.reporter.add(channel)
    if comm.size == 1:
        _alone = True
        return
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = node.allgather(_cores())
    watchdog.know(dict(node.allgather((MPI.COMM_WORLD.rank, os.getpid()))))
    local_device.number_on(node)
    node.Free()
    if _together:
        return
    _together = True
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_for(_cores(), cores))
    if comm.rank:
        # All ranks warn alike. Behind the user's own filters, which may make errors of warnings.
        warnings.simplefilter("ignore", ReplicationWarning, append=True)


def keep_memory() -> None:
    """Set the allocator, once: of a rank of a job of several, or as asked for."""
    global _memory_kept
    if not _memory_kept:
        _memory_kept = True
        allocator.keep_memory(MPI.COMM_WORLD.size)
