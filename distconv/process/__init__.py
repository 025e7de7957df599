"""Start of the process, its allocator, waits and exits, and reports about them.

::

    call_stack     Where a thread is, in the user's terms: their line, the layer, the function of torch
    command_start  The restart of a command with an allocator that keeps freed blocks
    endings        Coordination of exits: ranks end together, or the job ends and names the rank that failed or left
    environment    The environment variables that distconv reads: all of them are here
    launchers      The import of MPI, and the check that MPI has all processes that the launcher started
    memory         How memory is kept from step to step, and the explanation of out-of-memory errors
    patches        Patches of torch: the attributes that distconv replaces, why, and by which module
    profiling      Named ranges in the traces of ``torch.profiler``: ``distconv::conv2d``, ``distconv::wait``, ...
    startup        The start of distconv in a process: everything that has an effect on the process
    stop_requests  Signals that ask a training to stop
    stuck_ranks    Reports of stuck ranks: where every rank is while one of them waits for long
    watchdog       The watchdog: reports ranks that wait for long, and ends the job when a wait lasts too long
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


def start(comm: MPI.Intracomm) -> None:
    """Start distconv on the ranks of ``comm``, as :func:`distconv.process.startup.start` does.

    Collective: call on every rank of ``comm``. A script need not call it, since its first grid does.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that start together.
    """
    from distconv.process import startup

    startup.start(comm)
