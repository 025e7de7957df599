"""What a process does when distconv is imported under MPI: its share of the cores, the allocator, excepthooks."""

from __future__ import annotations

import os

import torch
from mpi4py import MPI

from distconv import allocator, watchdog


def cores_per_rank(ranks_here: int) -> int:
    """Cores that this rank may use without taking another's, at least one."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // ranks_here)


def set_up() -> None:
    """Prepare this process; does nothing to threads and excepthooks when it runs alone."""
    ranks = MPI.COMM_WORLD.size
    allocator.keep_freed_memory(ranks)
    if ranks == 1:
        return
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if "OMP_NUM_THREADS" not in os.environ:
        # A rank bound to its own cores sees only those; unbound ranks share what the node has.
        alone = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1) if hasattr(os, "sched_getaffinity") else False
        torch.set_num_threads(cores_per_rank(1 if alone else node.size))
    node.Free()
    watchdog.install_excepthooks()
