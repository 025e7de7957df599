"""Coordination of exits: ranks end together, or the job ends and names the rank that failed or left.

MPI_Finalize waits for ranks that have not ended, and ranks that wait for a rank that is gone wait forever. So every
rank takes part in one collective when it ends, with a digest of how it ends. Ranks that end together find it complete.

1. An exception that all ranks raise is printed once. Any other is printed by its rank, and the job ends.
2. A rank that has reached the end of its program may be earlier than the others, which perhaps write a result: it waits
   for them. If they wait, too, the watchdog ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from distconv.errors import DISAGREEMENT, DistconvError, MismatchError
from distconv.process import call_stack, watchdog
from distconv.process.environment import TRACEBACK
from distconv.process.memory import out_of_memory
from distconv.process.stuck_ranks import print_to_stderr

_LEAVE_S = 2.0
"""Ranks that reach the end of their program within this time of each other leave together."""

_FAIL_S = 1.0
"""Ranks that fail within this time fail together: only rank 0 prints an error that is the same on all."""

_channels: list[watchdog.ExitChannel] = []
"""The communicators over which this rank coordinates its exit, in the order in which they were made."""
_exit_callbacks: list[Callable[[], None]] = []
"""Functions that are called at the end of the interpreter, after the wait for the other ranks."""
_process = 0
"""Process id of the rank after :func:`install_exit_handlers`, else 0. Forked children differ from it."""
_user_hook: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None
_user_thread_hook: Callable[[threading.ExceptHookArgs], Any] | None = None
"""Hooks that were set before the first grid: they print uncaught exceptions."""


def are_coordinated(comm: MPI.Intracomm) -> bool:
    """Return True if one channel includes all ranks of ``comm``, so that they need no further one.

    A channel is made on all of its ranks at once. So every rank of ``comm`` gets the same answer without a message, and
    all or none of them make a further channel, which is collective.
    """
    return any(channel.has_all_of(comm) for channel in _channels)


def is_installed() -> bool:
    """Return True if an uncaught exception of this rank ends the job: from its first grid on."""
    return bool(_process)


def install_exit_handlers() -> None:
    """Replace the hooks for uncaught exceptions, once, in a job of several ranks."""
    global _process, _user_hook, _user_thread_hook
    if _process or MPI.COMM_WORLD.size == 1:
        return
    _process = os.getpid()
    if sys.excepthook is not sys.__excepthook__:
        _user_hook = sys.excepthook
    if threading.excepthook is not threading.__excepthook__:
        _user_thread_hook = threading.excepthook
    sys.excepthook = _handle_exception
    threading.excepthook = _handle_thread_exception


def coordinate_exits(comm: MPI.Intracomm) -> None:
    """Coordinate the exits of the ranks of ``comm`` from now on.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks. It is duplicated.
    """
    if not _channels:
        atexit.register(_exit_normally)
        # MPI_Finalize drops the attributes of COMM_SELF first (MPI-4.1, 11.2.4).
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=watchdog.stop), True)
    channel = watchdog.ExitChannel(comm)
    _channels.append(channel)
    # Without it the watchdog's thread may not call MPI while the main thread waits in it.
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        watchdog.reporter.channels.append(channel)


class _ExitCollective:
    """The collective in which ranks end, on each channel; each rank passes a digest of how it ends."""

    def __init__(self, how: str) -> None:
        digest = zlib.crc32(how.encode())
        # One buffer for each channel, which must exist as long as MPI writes to it.
        self._extremes = [np.array([digest, -digest], dtype=np.int64) for _ in _channels]
        self._requests = [
            channel.comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MIN)
            for channel, extremes in zip(_channels, self._extremes, strict=True)
        ]

    def is_complete(self, limit_s: float) -> bool:
        """Return True if all ranks end within ``limit_s``."""
        end = time.monotonic() + limit_s
        # Wait would not return if a rank never ends.
        while not MPI.Request.Testall(self._requests):
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def is_same(self) -> bool:
        """Return True if all ranks have ended in the same way."""
        return all(lowest == -highest for lowest, highest in self._extremes)


def _exit_normally() -> None:
    """Wait at the end of the interpreter until all ranks end, or the watchdog ends the job."""
    # A forked child has the handlers, but is not a rank.
    if os.getpid() == _process and not MPI.Is_finalized():
        _wait_for_other_exits()
    for act in _exit_callbacks:
        act()


def call_after_exit_wait(act: Callable[[], None]) -> None:
    """Register ``act`` to be called at the end of the interpreter, after the wait for the other ranks."""
    _exit_callbacks.append(act)


def _wait_for_other_exits() -> None:
    watchdog.reporter.has_left = True
    # Python has reported an exception, and the user's hook has neither ended the job nor the process.
    if getattr(sys, "last_value", None) is not None and sys.excepthook is not _handle_exception:
        watchdog.end_job(f"rank {MPI.COMM_WORLD.rank} failed, and its own sys.excepthook has taken the exception", 1)
    ending = _ExitCollective("leaving")
    if not ending.is_complete(_LEAVE_S):
        # Without channels the watchdog cannot find out that another rank still computes, and would end the job.
        wait = watchdog.waiting(lambda: "the end of the other ranks")
        with wait if watchdog.reporter.channels else contextlib.nullcontext():
            while not ending.is_complete(watchdog.PAUSE_S):
                pass


def _handle_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if MPI.Is_finalized():
        traceback.print_exception(kind, value, trace)
        return
    code = DISAGREEMENT if isinstance(value, MismatchError) else 1
    # Of ranks that fail together only the first one prints and ends the job. A rank that has left, or a forked child,
    # takes part in no further collective: it prints for itself.
    first = all(channel.comm.rank == 0 for channel in _channels)
    is_alone = watchdog.reporter.has_left or os.getpid() != _process
    if first or is_alone:
        _print_failure(kind, value, trace)
    if not is_alone:
        ending = _ExitCollective(f"{kind.__qualname__}: {value}")
        if not first:
            if ending.is_complete(_FAIL_S) and ending.is_same():
                time.sleep(_LEAVE_S)  # rank 0 ends the job, unless no rank is the first on all of its channels
            _print_failure(kind, value, trace)
        else:
            # Time for ranks that fail in the same way: they find this rank's digest, and print nothing.
            ending.is_complete(_FAIL_S)
    watchdog.abort(code)


def _handle_thread_exception(failed: threading.ExceptHookArgs) -> None:
    if _user_thread_hook is not None:
        _user_thread_hook(failed)
    else:
        _print_failure(failed.exc_type, failed.exc_value, failed.exc_traceback)
    watchdog.abort(DISAGREEMENT if isinstance(failed.exc_value, MismatchError) else 1)


def _print_failure(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
    text = "" if _user_hook is not None else _format_traceback(kind, value, trace)
    print_to_stderr(
        f"distconv: rank {MPI.COMM_WORLD.rank} failed\n{text}{out_of_memory.explain_memory_error(value, trace)}".rstrip(
            "\n"
        )
    )
    if _user_hook is not None and value is not None:
        _user_hook(kind, value, trace)
        sys.stderr.flush()


def _format_traceback(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> str:
    """Return the traceback; that of distconv's own errors without the lines below the user's call."""
    told = traceback.TracebackException(kind, value, trace)  # type: ignore[arg-type]
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    users = [line for line, frame in zip(told.stack, frames, strict=True) if not call_stack.is_distconv_frame(frame)]
    if isinstance(value, DistconvError) and users and TRACEBACK.value() != "full":
        told.stack = traceback.StackSummary.from_list(users)
        told.__cause__ = told.__context__ = None
    return "".join(told.format())
