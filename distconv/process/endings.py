"""How ranks end: all together, or the job ends and names the rank that left or failed.

MPI waits in its finalization for ranks that stay, and ranks that wait for one that is gone wait for ever; no launcher
tells. So every end of a rank is one collective, which ranks that end together find complete:

1. Who ends takes part in it, with a digest of how, and waits a little for the others.
2. An exception that all ranks raise alike is printed once. Any other is printed by its rank, and the job ends.
3. A rank that leaves with an error code, or at once (``os._exit``, ``os.execv``), ends the job.
4. One that has just come to its end may do so before the others, which perhaps write a result. It tells them, and they
   tell it when they are waiting for messages: once all of them do, no message is to come, and it ends the job.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from distconv.errors import DISAGREEMENT, DistconvError, MismatchError
from distconv.process import call_stack, watchdog
from distconv.process.environment import TRACEBACK
from distconv.process.memory import out_of_memory

_LEAVE_S = 2.0
"""Ranks that leave within this time of each other leave together."""

_FAIL_S = 1.0
"""The same for ranks that fail: what rank 0 has printed the others do not repeat."""

_STUCK_S = 1.0
"""A rank that has waited this long may wait for one that left."""

_LEFT, _STUCK = 1, 2
"""Tags: the sender has left; what the sender is waiting for, or nothing any more."""


class Channel:
    """A communicator whose ranks coordinate their exits. Collective to make."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.group = self.comm.Get_group()
        self.world_ranks: list[int] = self.comm.allgather(MPI.COMM_WORLD.rank)
        self.spans_world = self.comm.size == MPI.COMM_WORLD.size

    def has_all_of(self, comm: MPI.Intracomm) -> bool:
        """Return True if every rank of ``comm`` is on this channel."""
        group = comm.Get_group()
        both = MPI.Group.Intersection(group, self.group)
        contained = bool(both.size == group.size)
        both.Free()
        group.Free()
        return contained


_channels: list[Channel] = []
_process = 0
_exit_code = 0
_leaving = False
_users_hook: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None
_users_thread_hook: Callable[[threading.ExceptHookArgs], Any] | None = None
"""Hooks that were set before the first grid: they print what has failed."""


def are_watched(comm: MPI.Intracomm) -> bool:
    """Return True if one channel has all ranks of ``comm``: they need no further one.

    A channel is made on all of its ranks at once, so every rank of ``comm`` comes to the same answer without a message.
    """
    return any(channel.has_all_of(comm) for channel in _channels)


def watch(comm: MPI.Intracomm) -> Channel | None:
    """Coordinate the exits of the ranks of ``comm``; returns their channel if it is a new one. Collective over it.

    A rank of a job of several ends the job when it fails, also where ``comm`` has no other rank.
    """
    global _process
    if MPI.COMM_WORLD.size == 1:
        return None
    if not _process:
        _process = os.getpid()
        _install()
    if comm.size == 1 or are_watched(comm):
        return None
    channel = Channel(comm)
    _channels.append(channel)
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        watchdog.call(_Stayer(channel).look)
    return channel


def is_installed() -> bool:
    """Return True if an uncaught exception of this rank ends the job: from its first grid on."""
    return bool(_process)


def is_leaving() -> bool:
    """Return True once this rank has come to the end of its program."""
    return _leaving


def _install() -> None:
    global _users_hook, _users_thread_hook
    if sys.excepthook is not sys.__excepthook__:
        _users_hook = sys.excepthook
    if threading.excepthook is not threading.__excepthook__:
        _users_thread_hook = threading.excepthook
    sys.excepthook = _failed
    threading.excepthook = _failed_in_thread
    sys.exit = _exit
    for name in ("_exit", "execv", "execve"):
        setattr(os, name, _announced(getattr(os, name)))
    _at_exit_of_c()
    atexit.register(_leave)
    # MPI_Finalize drops the attributes of COMM_SELF first (MPI-4.1, 11.2.4).
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=watchdog.stop_calls), True)


class _Ending:
    """The collectives in which ranks end, one on each channel; each rank passes a digest of how it does."""

    def __init__(self, channels: Sequence[Channel], how: str) -> None:
        digest = zlib.crc32(how.encode())
        self._extremes = [np.array([digest, -digest], dtype=np.int64) for _ in channels]
        self._requests = [
            channel.comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MIN)
            for channel, extremes in zip(channels, self._extremes, strict=True)
        ]

    def all_within(self, limit_s: float) -> bool:
        """Whether all ranks end by then."""
        end = time.monotonic() + limit_s
        while not MPI.Request.Testall(self._requests):
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def alike(self) -> bool:
        """Whether all, where they have ended, did so in the same way."""
        return all(lowest == -highest for lowest, highest in self._extremes)


# -- leaving ----------------------------------------------------------------------------------------------------------


class _Exit(SystemExit):
    """What ``sys.exit`` raises; knows whether it ends the process, or somebody catches it.

    The interpreter, when nothing has caught it, asks for ``code``, with no Python frame left.
    """

    @property
    def code(self) -> str | int | None:  # type: ignore[override]
        global _exit_code
        status: str | int | None = self.args[0] if self.args else None
        try:
            sys._getframe(1)
        except ValueError:
            _exit_code = int(status) if isinstance(status, int) else int(status is not None)
        return status


def _exit(status: str | int | None = None, /) -> NoReturn:
    raise _Exit(status)


def _announced(leave: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ends this program at once, announced to the other ranks."""

    def announced(*arguments: Any) -> None:
        if os.getpid() == _process:  # not a child, of a data loader for example
            _left(arguments[0] if isinstance(arguments[0], int) else 0, at_once=True)
        leave(*arguments)

    return announced


def _leave() -> None:
    """At the end of the interpreter. An exception that a foreign excepthook printed is known by its trace alone."""
    _left(_exit_code or int(getattr(sys, "last_value", None) is not None), at_once=False)


def _left(code: int, *, at_once: bool) -> None:
    global _leaving
    if not _channels or _leaving or os.getpid() != _process or MPI.Is_finalized():
        return
    _leaving = True
    ending = _Ending(_channels, "leaving")
    if ending.all_within(_LEAVE_S):
        return
    if code or at_once:
        _end_job(f"rank {MPI.COMM_WORLD.rank} left with exit code {code} and the others did not", code or 1)
    departures = [_Departure(channel) for channel in _channels]
    while not ending.all_within(watchdog.PAUSE_S):
        for departure in departures:
            departure.look()


class _Departure:
    """The wait of a rank that has left, on one channel: until the others have left, too, or wait for messages.

    Nobody will send them.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, comm = channel, channel.comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._told = [comm.isend(None, rank, _LEFT) for rank in self._others]
        self._stuck: dict[int, str] = {}
        self._left: set[int] = set()
        self._confirmed = 0

    def look(self) -> None:
        """End the job if no other rank can come to an end."""
        comm, world_ranks = self._channel.comm, self._channel.world_ranks
        MPI.Request.Testall(self._told)
        self._left |= arrived(comm, _LEFT).keys()
        self._stuck |= arrived(comm, _STUCK)
        waiting = {rank: text for rank, text in self._stuck.items() if text and rank not in self._left}
        # Twice: one of them may have gone on, and said so only now.
        self._confirmed = self._confirmed + 1 if len(waiting) + len(self._left) == len(self._others) else 0
        if self._confirmed >= 2 and waiting and not any(rank < comm.rank for rank in self._left):
            what = "; ".join(f"rank {world_ranks[rank]} waits {text}" for rank, text in sorted(waiting.items())[:4])
            why = f"rank {MPI.COMM_WORLD.rank} has left, at the end of its program, but {what}"
            _end_job(why, watchdog.ABORT_CODE)


def arrived(comm: MPI.Intracomm, tag: int) -> dict[int, Any]:
    """The last message that each rank has sent with this tag, of those that are there."""
    arrived, status = {}, MPI.Status()
    while comm.Iprobe(tag=tag):
        message = comm.recv(tag=tag, status=status)
        arrived[status.source] = message
    return arrived


def _end_job(why: str, code: int) -> None:
    print(f"distconv: {why}; ending the job", file=sys.stderr, flush=True)
    watchdog.abort(code)


class _Stayer:
    """Tells ranks that have left whether this one is waiting; in the watchdog's thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._comm = channel, channel.comm
        self._left: dict[int, str] = {}
        """Ranks that have left, and what each was told last."""
        self._sent: list[MPI.Request] = []
        self._place: tuple[int, int] | None = None
        """Where the main thread was: its frame's id, since the frame itself would keep what it has, and instruction."""
        self._there_since = 0.0

    def look(self) -> None:
        """To be called now and then. Frames are looked at only when a rank has left: it keeps what they hold alive."""
        if _leaving:
            return
        self._left |= dict.fromkeys(arrived(self._comm, _LEFT), "")
        text = self._waits_for() if self._left else ""
        for rank, told in self._left.items():
            if bool(told) != bool(text):
                self._sent.append(self._comm.isend(text, rank, _STUCK))
                self._left[rank] = text
        MPI.Request.Testall(self._sent)

    def _waits_for(self) -> str:
        """Return the wait of this rank as a clause; empty if it may be computing.

        A rank on several channels may wait for one of another, and in a call of MPI of the user's for any of the job.
        """
        if len(_channels) > 1 and not self._channel.spans_world:
            return ""
        waits = watchdog.waiting_longer_than(_STUCK_S)
        if waits:
            return f"in {waits[0]}"
        if not self._channel.spans_world:
            return ""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return ""
        now, place = time.monotonic(), (id(frame), frame.f_lasti)
        if place != self._place:
            self._place, self._there_since = place, now
        if now - self._there_since < _STUCK_S:
            return ""
        method = call_stack.mpi_method(frame)
        return f"in {method} at {call_stack.described(frame)}" if method else ""


_c_exit = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: _left(0, at_once=True))
"""Kept, as C does not."""


def _at_exit_of_c() -> None:
    """Look after ``exit`` of C and ``STOP`` of Fortran, which know nothing of Python's ``atexit``."""
    c = ctypes.CDLL(None)
    register, run = getattr(c, "__cxa_atexit", None), getattr(c, "__cxa_finalize", None)
    if register is None or run is None:
        return
    key = ctypes.create_string_buffer(1)
    register(_c_exit, None, key)
    # Behind Python's own end it must not be called. To run it is to take it away; it finds that this rank has left.
    atexit.register(lambda: run(key))


# -- failing ----------------------------------------------------------------------------------------------------------


def _failed(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if not _process or MPI.Is_finalized():
        traceback.print_exception(kind, value, trace)
        return
    code = DISAGREEMENT if isinstance(value, MismatchError) else 1
    if _leaving or os.getpid() != _process:
        _print_failure(kind, value, trace)
        watchdog.abort(code)
    first = all(channel.comm.rank == 0 for channel in _channels)
    if first:
        _print_failure(kind, value, trace)
    ending = _Ending(_channels, f"{kind.__qualname__}: {value}")
    if ending.all_within(_FAIL_S) and ending.alike():
        if not first:
            time.sleep(_LEAVE_S)  # rank 0 ends the job
            _print_failure(kind, value, trace)  # unless no rank is the first on all of its channels
    elif not first:
        _print_failure(kind, value, trace)
    watchdog.abort(code)


def _failed_in_thread(failed: threading.ExceptHookArgs) -> None:
    if _users_thread_hook is not None:
        _users_thread_hook(failed)
    else:
        _print_failure(failed.exc_type, failed.exc_value, failed.exc_traceback)
    watchdog.abort(DISAGREEMENT if isinstance(failed.exc_value, MismatchError) else 1)


def _print_failure(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
    told = "" if _users_hook is not None else _formatted(kind, value, trace)
    text = told + out_of_memory.explanation(value, trace)
    print(f"distconv: rank {MPI.COMM_WORLD.rank} failed\n{text}", file=sys.stderr, end="", flush=True)
    if _users_hook is not None and value is not None:
        _users_hook(kind, value, trace)
        sys.stderr.flush()


def _formatted(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> str:
    """The traceback; of an error that speaks for itself without what is below the user's call."""
    told = traceback.TracebackException(kind, value, trace)  # type: ignore[arg-type]
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    users = [line for line, frame in zip(told.stack, frames, strict=True) if not call_stack.is_ours(frame)]
    if isinstance(value, DistconvError) and users and TRACEBACK.value() != "full":
        told.stack = traceback.StackSummary.from_list(users)
        told.__cause__ = told.__context__ = None
    return "".join(told.format())
