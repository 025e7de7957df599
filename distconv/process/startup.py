"""What a process does when distconv is imported under MPI: its share of the cores, the allocator, excepthooks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
from mpi4py import MPI

from distconv import local_device
from distconv.errors import ReplicationWarning
from distconv.process import allocator, watchdog


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


def set_up() -> None:
    """Prepare this process; does nothing to threads and excepthooks when it runs alone or MPI is not running yet."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    ranks = MPI.COMM_WORLD.size
    allocator.keep_memory(ranks)
    if ranks == 1:
        return
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_for(_cores(), node.allgather(_cores())))
    watchdog.know(dict(node.allgather((MPI.COMM_WORLD.rank, os.getpid()))))
    local_device.number_on(node)
    node.Free()
    if MPI.COMM_WORLD.rank:
        # All ranks warn alike. Behind the user's own filters, which may make errors of warnings.
        warnings.simplefilter("ignore", ReplicationWarning, append=True)
    watchdog.install_excepthooks()
    watchdog.install_exit_hook()
