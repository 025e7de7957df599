"""What a process does when distconv is imported under MPI: its share of the cores, the allocator, excepthooks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
from mpi4py import MPI

from distconv import local_device
from distconv.errors import ReplicationWarning
from distconv.process import command_start, endings, environment, watchdog
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


_memory_kept = _ready = False


def set_up(comm: MPI.Intracomm | None = None) -> None:
    """Prepare this process, once: when distconv is imported, or where MPI is not running then with the first grid.

    Collective over ``comm`` (default: all ranks). Does nothing to threads and excepthooks of a process that runs alone.
    """
    global _memory_kept, _ready
    if _ready or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    if not _memory_kept:
        allocator.keep_memory(MPI.COMM_WORLD.size)
        _memory_kept = True
    late, comm = comm is not None, comm or MPI.COMM_WORLD
    if late:
        command_start.check_launch()
    if comm.size == 1:
        return
    if late:
        environment.check(comm)
    _ready = True
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_for(_cores(), node.allgather(_cores())))
    watchdog.know(dict(node.allgather((MPI.COMM_WORLD.rank, os.getpid()))))
    local_device.number_on(node)
    node.Free()
    if MPI.COMM_WORLD.rank:
        # All ranks warn alike. Behind the user's own filters, which may make errors of warnings.
        warnings.simplefilter("ignore", ReplicationWarning, append=True)
    endings.watch(comm)
