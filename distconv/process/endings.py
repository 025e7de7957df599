"""How ranks end: all together, or the job ends and names the rank that failed or left.

MPI waits in its finalization for ranks that stay, and ranks that wait for one that is gone wait for ever. So every end
of a rank takes part in one collective, with a digest of how the rank ends; ranks that end together find it complete.

1. An exception that all ranks raise is printed once. Any other is printed by its rank, and the job ends.
2. A rank that has come to the end of its program may do so before the others, which perhaps write a result: it waits
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
from distconv.process.stuck_ranks import show

_LEAVE_S = 2.0
"""Ranks that leave within this time of each other leave together."""

_FAIL_S = 1.0
"""The same for ranks that fail: what rank 0 has printed the others do not repeat."""

_channels: list[watchdog.Channel] = []
_after_leaving: list[Callable[[], None]] = []
_process = 0
_users_hook: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None
_users_thread_hook: Callable[[threading.ExceptHookArgs], Any] | None = None
"""Hooks that were set before the first grid: they print what has failed."""


def are_watched(comm: MPI.Intracomm) -> bool:
    """Return True if one channel has all ranks of ``comm``: they need no further one.

    A channel is made on all of its ranks at once, so every rank of ``comm`` comes to the same answer without a message.
    """
    return any(channel.has_all_of(comm) for channel in _channels)


def is_installed() -> bool:
    """Return True if an uncaught exception of this rank ends the job: from its first grid on."""
    return bool(_process)


def install() -> None:
    """Replace the hooks for uncaught exceptions, of a rank of a job of several, at the first call."""
    global _process, _users_hook, _users_thread_hook
    if _process or MPI.COMM_WORLD.size == 1:
        return
    _process = os.getpid()
    if sys.excepthook is not sys.__excepthook__:
        _users_hook = sys.excepthook
    if threading.excepthook is not threading.__excepthook__:
        _users_thread_hook = threading.excepthook
    sys.excepthook = _failed
    threading.excepthook = _failed_in_thread


def coordinate(comm: MPI.Intracomm) -> None:
    """Coordinate the exits of the ranks of ``comm`` from now on. Collective over ``comm``."""
    if not _channels:
        atexit.register(_leave)
        # MPI_Finalize drops the attributes of COMM_SELF first (MPI-4.1, 11.2.4).
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=watchdog.stop), True)
    channel = watchdog.Channel(comm)
    _channels.append(channel)
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        watchdog.reporter.channels.append(channel)


class _Ending:
    """The collectives in which ranks end, one on each channel; each rank passes a digest of how it ends."""

    def __init__(self, how: str) -> None:
        digest = zlib.crc32(how.encode())
        self._extremes = [np.array([digest, -digest], dtype=np.int64) for _ in _channels]
        self._requests = [
            channel.comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MIN)
            for channel, extremes in zip(_channels, self._extremes, strict=True)
        ]

    def is_complete(self, limit_s: float) -> bool:
        """Return True if all ranks end within ``limit_s``."""
        end = time.monotonic() + limit_s
        while not MPI.Request.Testall(self._requests):
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def is_same(self) -> bool:
        """Return True if all ranks have ended in the same way."""
        return all(lowest == -highest for lowest, highest in self._extremes)


def _leave() -> None:
    """Wait at the end of the interpreter until all ranks leave, or the watchdog ends the job."""
    if os.getpid() == _process and not MPI.Is_finalized():
        _leave_together()
    for act in _after_leaving:
        act()


def after_leaving(act: Callable[[], None]) -> None:
    """Have ``act`` called at the end of the interpreter, after the wait for the other ranks."""
    _after_leaving.append(act)


def _leave_together() -> None:
    watchdog.reporter.has_left = True
    if getattr(sys, "last_value", None) is not None and sys.excepthook is not _failed:
        watchdog.end_job(f"rank {MPI.COMM_WORLD.rank} failed, and its own sys.excepthook has taken the exception", 1)
    ending = _Ending("leaving")
    if not ending.is_complete(_LEAVE_S):
        # Without channels the watchdog cannot see whether another rank computes, and would end the job.
        wait = watchdog.waiting(lambda: "the end of the other ranks")
        with wait if watchdog.reporter.channels else contextlib.nullcontext():
            while not ending.is_complete(watchdog.PAUSE_S):
                pass


def _failed(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if MPI.Is_finalized():
        traceback.print_exception(kind, value, trace)
        return
    code = DISAGREEMENT if isinstance(value, MismatchError) else 1
    first = all(channel.comm.rank == 0 for channel in _channels)
    is_alone = watchdog.reporter.has_left or os.getpid() != _process
    if first or is_alone:
        _print_failure(kind, value, trace)
    if not is_alone:
        ending = _Ending(f"{kind.__qualname__}: {value}")
        if not first:
            if ending.is_complete(_FAIL_S) and ending.is_same():
                time.sleep(_LEAVE_S)  # rank 0 ends the job, unless no rank is the first on all of its channels
            _print_failure(kind, value, trace)
        else:
            ending.is_complete(_FAIL_S)
    watchdog.abort(code)


def _failed_in_thread(failed: threading.ExceptHookArgs) -> None:
    if _users_thread_hook is not None:
        _users_thread_hook(failed)
    else:
        _print_failure(failed.exc_type, failed.exc_value, failed.exc_traceback)
    watchdog.abort(DISAGREEMENT if isinstance(failed.exc_value, MismatchError) else 1)


def _print_failure(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
    told = "" if _users_hook is not None else _formatted(kind, value, trace)
    show(f"distconv: rank {MPI.COMM_WORLD.rank} failed\n{told}{out_of_memory.explanation(value, trace)}".rstrip("\n"))
    if _users_hook is not None and value is not None:
        _users_hook(kind, value, trace)
        sys.stderr.flush()


def _formatted(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> str:
    """Return the traceback; of distconv's own errors without the lines below the user's call."""
    told = traceback.TracebackException(kind, value, trace)  # type: ignore[arg-type]
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    users = [line for line, frame in zip(told.stack, frames, strict=True) if not call_stack.is_ours(frame)]
    if isinstance(value, DistconvError) and users and TRACEBACK.value() != "full":
        told.stack = traceback.StackSummary.from_list(users)
        told.__cause__ = told.__context__ = None
    return "".join(told.format())
