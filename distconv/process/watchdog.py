"""Ends a wait that blocks for too long, and failures on one rank that would leave the others waiting.

MPI never returns from a wait for a message that nobody sends, and a signal handler never runs meanwhile, so a daemon
thread looks at what the blocked threads said they wait for. ``DISTCONV_TIMEOUT_S`` is how long that may take.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from distconv.errors import DISAGREEMENT, MismatchError
from distconv.process import call_stack, out_of_memory
from distconv.process.environment import TIMEOUT_S
from distconv.process.profiling import section

ABORT_CODE = 75
"""Exit code of a job that the watchdog ended (EX_TEMPFAIL)."""

_EXIT_TOGETHER_S = 2.0
"""Ranks that leave with an error code within this time of each other leave together."""

_OTHERS_S = 1.5
"""How long other ranks get to report that they have waited too long."""

_UNKNOWN = (
    "which other ranks have perhaps not called; DISTCONV_CHECK=all tells at once where ranks call different things; "
)

_LAST_WORDS_S = 0.2
"""How long a launcher gets to pass on a report."""

_exit_code = 0
timeout_s = TIMEOUT_S.value()
Wait = tuple[float, Callable[[], str]]
"""Since when, by ``time.monotonic``, and what for."""

_waits: dict[int, Wait] = {}
_looks: list[Callable[[], Iterable[Wait]]] = []
_started = threading.Lock()
_processes: dict[int, int] = {}
"""Rank and process of all ranks on this node."""


class waiting:
    """Tell the watchdog that this thread may block from here; ``describe`` is called only if it has to report."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe, self._section = describe, section("wait")
        self._outer: Wait | None = None

    def __enter__(self) -> None:
        self._section.__enter__()
        if timeout_s:
            _start()
            thread = threading.get_ident()
            self._outer = _waits.get(thread)
            _waits[thread] = (time.monotonic(), self._describe)

    def __exit__(self, *raised: Any) -> None:
        if timeout_s:
            thread = threading.get_ident()
            if self._outer is None:
                _waits.pop(thread, None)
            else:
                _waits[thread] = self._outer
        self._section.__exit__(*raised)


def look_at(waits: Callable[[], Iterable[Wait]]) -> None:
    """Tell the watchdog to ask ``waits`` each time, from its thread, what is waited for that blocks no thread."""
    if timeout_s and waits not in _looks:
        _looks.append(waits)
        _start()


def _start() -> None:
    if _started.acquire(blocking=False):
        threading.Thread(target=_watch, name="distconv-watchdog", daemon=True).start()


def know(processes: Mapping[int, int]) -> None:
    """Rank and process id of the ranks on this node: a report then names those that do nothing any more."""
    _processes.update(processes)


def _watch() -> None:
    pause = min(1.0, timeout_s / 4)
    while True:
        time.sleep(pause)
        now = time.monotonic()
        by_gpu = ((threading.main_thread().ident or 0, wait) for look in _looks for wait in look())
        for thread, (since, describe) in (*_waits.items(), *by_gpu):
            if now - since > timeout_s:
                _end(now - since, describe(), sys._current_frames().get(thread))


def _end(waited: float, what: str, frame: FrameType | None) -> None:
    call = call_stack.described(frame) if frame is not None else "a thread that is gone"
    print(
        f"distconv: rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} has waited {waited:.0f} s in {what}, for\n"
        f"    {call}\n"
        f"{_idle() or _UNKNOWN}ending the job "
        f"(raise DISTCONV_TIMEOUT_S={timeout_s:g} if this wait is meant to be long)",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.__stderr__ or 2)
    # Ranks that wait elsewhere began to at about the same time: their reports say what was not called here.
    time.sleep(_OTHERS_S)
    _abort(ABORT_CODE)


def _idle() -> str:
    """The ranks on this node that cannot come, since their processes are stopped or gone."""
    found = [f"rank {rank} (process {pid}) is {state}; " for rank, pid in _processes.items() if (state := _state(pid))]
    return "".join(found)


def _state(pid: int) -> str:
    """``stopped`` or ``gone``; nothing of a process that runs, or where the system does not tell."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "")


def _abort(code: int) -> None:
    """End the job. A launcher that is told so at once may drop what was just written to stderr."""
    time.sleep(_LAST_WORDS_S)
    MPI.COMM_WORLD.Abort(code)


def install_excepthooks() -> None:
    """Make an uncaught exception on one rank, in the main thread or another, end the whole job.

    With code 1, or ``errors.DISAGREEMENT`` if ranks disagree.
    """
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
    """Make a rank that leaves by itself end the whole job: by ``sys.exit`` with another code than 0, or ``os._exit``.

    Python tells no hook about either, MPI would wait in its finalization for the ranks that stayed, and a launcher may
    take ``os._exit(0)`` for success.
    """

    def leave(status: str | int | None = None, /) -> NoReturn:
        raise _Exit(status)

    at_once, process = os._exit, os.getpid()

    def leave_at_once(status: int) -> NoReturn:
        if os.getpid() == process:  # not a child, of a data loader for example
            _leave_together(status)
        at_once(status)

    sys.exit = leave
    os._exit = leave_at_once
    atexit.register(_leave)


def _leave() -> None:
    if _exit_code:
        _leave_together(_exit_code)


def _leave_together(code: int) -> None:
    """Wait a little for all ranks to leave, else end those that stay, with ``code`` or, if that is 0, with 1."""
    if MPI.Is_finalized():
        return
    everyone = MPI.COMM_WORLD.Ibarrier()
    end = time.monotonic() + _EXIT_TOGETHER_S
    while not everyone.Test():
        if time.monotonic() > end:
            print(
                f"distconv: rank {MPI.COMM_WORLD.rank} left with exit code {code} and the others did not; "
                "ending the job",
                file=sys.stderr,
                flush=True,
            )
            _abort(code or 1)
        time.sleep(0.01)


def _excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    _report(kind, value, trace)


def _report(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
    if MPI.Is_finalized():
        traceback.print_exception(kind, value, trace)
        return
    text = "".join(traceback.format_exception(kind, value, trace)) + out_of_memory.explanation(value, trace)
    print(f"distconv: rank {MPI.COMM_WORLD.rank} failed\n{text}", file=sys.stderr, end="", flush=True)
    _abort(DISAGREEMENT if isinstance(value, MismatchError) else 1)
