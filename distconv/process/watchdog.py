"""Ends a wait that blocks for too long, and failures on one rank that would leave the others waiting.

MPI never returns from a wait for a message that nobody sends, and a signal handler never runs meanwhile, so a daemon
thread looks at what the blocked threads said they wait for. ``DISTCONV_TIMEOUT_S`` is how long that may take.
"""

from __future__ import annotations

import atexit
import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

from mpi4py import MPI

from distconv.process import call_stack, out_of_memory
from distconv.process.environment import TIMEOUT_S
from distconv.process.profiling import section

ABORT_CODE = 75
"""Exit code of a job that the watchdog ended (EX_TEMPFAIL)."""

_EXIT_TOGETHER_S = 2.0
"""Ranks that leave with an error code within this time of each other leave together."""

_OTHERS_S = 1.5
"""How long other ranks get to report that they have waited too long."""

_LAST_WORDS_S = 0.2
"""How long a launcher gets to pass on a report."""

_exit_code = 0
timeout_s = TIMEOUT_S.value()
_waits: dict[int, tuple[float, Callable[[], str]]] = {}
_started = threading.Lock()


@contextmanager
def waiting(describe: Callable[[], str]) -> Iterator[None]:
    """Tell the watchdog that this thread may block from here; ``describe`` is called only if it has to report."""
    with section("wait"):
        if not timeout_s:
            yield
            return
        _start()
        thread = threading.get_ident()
        outer = _waits.get(thread)
        _waits[thread] = (time.monotonic(), describe)
        try:
            yield
        finally:
            if outer is None:
                _waits.pop(thread, None)
            else:
                _waits[thread] = outer


def _start() -> None:
    if _started.acquire(blocking=False):
        threading.Thread(target=_watch, name="distconv-watchdog", daemon=True).start()


def _watch() -> None:
    pause = min(1.0, timeout_s / 4)
    while True:
        time.sleep(pause)
        now = time.monotonic()
        for thread, (since, describe) in list(_waits.items()):
            if now - since > timeout_s:
                _end(now - since, describe(), sys._current_frames().get(thread))


def _end(waited: float, what: str, frame: FrameType | None) -> None:
    call = call_stack.described(frame) if frame is not None else "a thread that is gone"
    print(
        f"distconv: rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} has waited {waited:.0f} s in {what}, for\n"
        f"    {call}\n"
        "which other ranks have perhaps not called; DISTCONV_CHECK=all tells at once where ranks call different "
        f"things. Ending the job (raise DISTCONV_TIMEOUT_S={timeout_s:g} if this wait is meant to be long)",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.__stderr__ or 2)
    # Ranks that wait elsewhere began to at about the same time: their reports say what was not called here.
    time.sleep(_OTHERS_S)
    _abort(ABORT_CODE)


def _abort(code: int) -> None:
    """End the job. A launcher that is told so at once may drop what was just written to stderr."""
    time.sleep(_LAST_WORDS_S)
    MPI.COMM_WORLD.Abort(code)


def install_excepthooks() -> None:
    """Make an uncaught exception on one rank, in the main thread or another, end the whole job with code 1."""
    sys.excepthook = _excepthook
    threading.excepthook = lambda failed: _report(failed.exc_type, failed.exc_value, failed.exc_traceback)


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


def install_exit_hook() -> None:
    """Make ``sys.exit`` with another code than 0 end the whole job with that code, unless all ranks leave like that.

    Python tells no hook about SystemExit, and MPI would wait in its finalization for the ranks that stayed.
    """

    def leave(status: str | int | None = None, /) -> NoReturn:
        raise _Exit(status)

    sys.exit = leave
    atexit.register(_leave)


def _leave() -> None:
    if not _exit_code or MPI.Is_finalized():
        return
    everyone = MPI.COMM_WORLD.Ibarrier()
    end = time.monotonic() + _EXIT_TOGETHER_S
    while not everyone.Test():
        if time.monotonic() > end:
            print(
                f"distconv: rank {MPI.COMM_WORLD.rank} left with exit code {_exit_code} and the others did not; "
                "ending the job",
                file=sys.stderr,
                flush=True,
            )
            _abort(_exit_code)
        time.sleep(0.01)


def _excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    _report(kind, value, trace)


def _report(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
    if MPI.Is_finalized():
        traceback.print_exception(kind, value, trace)
        return
    text = "".join(traceback.format_exception(kind, value, trace)) + out_of_memory.explanation(value, trace)
    print(f"distconv: rank {MPI.COMM_WORLD.rank} failed\n{text}", file=sys.stderr, end="", flush=True)
    _abort(1)
