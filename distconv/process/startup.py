"""The start of distconv in a process: everything that has an effect on the process happens here.

Importing distconv only defines things, so a job may have ranks that never import it. The first
:class:`~distconv.ProcessGrid` starts distconv on the ranks of its communicator, and a command on all ranks of its job.
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


def _available_cores() -> frozenset[int]:
    """Return the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def thread_count(mine: frozenset[int], everyone: Sequence[frozenset[int]]) -> int:
    """Return the number of threads for a rank.

    A rank that is bound to its own cores gets all of them; ranks that share cores divide them.

    Parameters
    ----------
    mine : frozenset of int
        Cores that this rank may use.
    everyone : sequence of frozenset of int
        Cores that each rank of the node may use, this rank included.

    Returns
    -------
    int
        At least 1.

    Examples
    --------
    >>> thread_count(frozenset({0, 1}), [frozenset({0, 1}), frozenset({2, 3})])
    2
    >>> thread_count(frozenset({0, 1}), [frozenset({0, 1}), frozenset({0, 1})])
    1
    """
    return max(1, len(mine) // sum(bool(mine & other) for other in everyone))


_started_ranks = 0
"""Size of the largest communicator that this process has started with; 0 before the first start."""


def start(comm: MPI.Intracomm) -> None:
    """Start distconv on the ranks of ``comm``.

    Collective: call on every rank of ``comm``. Does nothing if one earlier start included all of these ranks. The page
    "What starting does" of the documentation lists the steps.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that start together. Other ranks of the job are left alone.

    Raises
    ------
    LaunchError
        On all processes, if the launcher started several and MPI has one rank in each.
    EnvironmentVariableError
        On all ranks of ``comm``, if a variable is invalid on any of them, or differs.
    """
    global _started_ranks
    launchers.check_launched_ranks(MPI.COMM_WORLD.size, MPI.get_vendor()[0])  # [1]
    # torch runs the backward pass of each GPU in a thread of its own. The order of the nodes would then differ between
    # ranks, whose messages are matched by their order.
    torch.autograd.set_multithreading_enabled(False)
    if endings.are_coordinated(comm) or (comm.size == 1 and _started_ranks):
        return
    with watchdog.waiting(lambda: f"the start of distconv on {comm.size} ranks"):
        environment.check(comm)  # [2]
    if comm.size > 1:
        _divide_node(comm)  # [3] and [4]
    if not _started_ranks:
        allocator.keep_memory(MPI.COMM_WORLD.size)  # [5]
    patches.apply()  # [6]
    endings.install_exit_handlers()  # [7]
    if comm.size > 1:
        endings.coordinate_exits(comm)  # [8] and [9]
        if comm.rank and _started_ranks < 2:
            # All ranks raise the same warnings; rank 0 shows them. The filter is appended, so that the user's filters,
            # which may turn warnings into errors, come first.
            warnings.simplefilter("ignore", ReplicationWarning, append=True)
    _started_ranks = max(_started_ranks, comm.size)


def _divide_node(comm: MPI.Intracomm) -> None:
    """Divide the cores and the GPUs of a node among its ranks, and record their processes for reports."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = node.allgather(_available_cores())
    # At the first start with several ranks only: the user may have set another number since.
    if "OMP_NUM_THREADS" not in os.environ and _started_ranks < 2:
        torch.set_num_threads(thread_count(_available_cores(), cores))
    local_device.set_local_rank(node)
    stuck_ranks.node_processes.update(node.allgather((MPI.COMM_WORLD.rank, os.getpid())))
    # MPI has few communicators, and this one is not needed any more.
    node.Free()
