"""Ends a wait that blocks for too long.

MPI never returns from a wait for a message that nobody sends, and a signal handler never runs meanwhile, so a daemon
thread looks at what the blocked threads said they wait for. ``DISTCONV_TIMEOUT_S`` is how long that may take.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from mpi4py import MPI

from distconv.process import call_stack
from distconv.process.environment import TIMEOUT_S
from distconv.process.profiling import section

ABORT_CODE = 75
"""Exit code of a job that the watchdog ended (EX_TEMPFAIL)."""

PAUSE_S = 0.25
"""How often, at least, it looks."""

_OTHERS_S = 1.5
"""How long other ranks get to report that they have waited too long."""

_UNKNOWN = (
    "which other ranks have perhaps not called; DISTCONV_CHECK=all tells at once where ranks call different things; "
)

_STOP_S = 1.0
"""How long the end of MPI waits for a call that is under way."""

_LAST_WORDS_S = 0.2
"""How long a launcher gets to pass on a report."""

timeout_s = TIMEOUT_S.value_or_default()
Wait = tuple[float, Callable[[], str]]
"""Since when, by ``time.monotonic``, and what for."""

NOTICE_S = 30.0
"""A rank that has waited this long is reported, with what the others do."""

notice_s = min(NOTICE_S, timeout_s / 2) if timeout_s else NOTICE_S

waits: dict[int, Wait] = {}
_looks: list[Callable[[], Iterable[Wait]]] = []
_calls: list[Callable[[], None]] = []
_at_end: list[Callable[[], None]] = []
_noted: set[tuple[int, float]] = set()
"""Waits that this rank has reported by itself, where no rank answers it."""
_started = threading.Lock()
_calling = threading.Lock()
_stopped = threading.Event()
_processes: dict[int, int] = {}
"""Rank and process of all ranks on this node."""


class waiting:
    """Tell the watchdog that this thread may block from here; ``describe`` is called only if it has to report."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe, self._section = describe, section("wait")
        self._outer: Wait | None = None

    def __enter__(self) -> None:
        self._section.__enter__()
        _start()
        # A wait inside another one (a sum within an agreement) is what the rank is at; the outer one goes on after it.
        thread = threading.get_ident()
        self._outer = waits.get(thread)
        waits[thread] = (time.monotonic(), self._describe)

    def __exit__(self, *raised: Any) -> None:
        thread = threading.get_ident()
        if self._outer is None:
            waits.pop(thread, None)
        else:
            waits[thread] = self._outer
        self._section.__exit__(*raised)


def look_at(waits: Callable[[], Iterable[Wait]]) -> None:
    """Tell the watchdog to ask ``waits`` each time, from its thread, what is waited for that blocks no thread."""
    if timeout_s and waits not in _looks:
        _looks.append(waits)
        _start()


def call(each_time: Callable[[], None]) -> None:
    """Have ``each_time`` called whenever the watchdog looks, in its thread, until :func:`stop_calls`."""
    _calls.append(each_time)
    _start()


def at_end(report: Callable[[], None]) -> None:
    """Have ``report`` called in the watchdog's thread before it ends the job; it prints where all ranks are."""
    _at_end.append(report)


def current_waits() -> list[tuple[int, float, Callable[[], str]]]:
    """This rank's waits: the thread, since when by ``time.monotonic``, and what for."""
    by_gpu = [(threading.main_thread().ident or 0, *wait) for look in _looks for wait in look()]
    # A copy in one step: the other threads go on changing the table.
    return [*((thread, *wait) for thread, wait in tuple(waits.items())), *by_gpu]


def stop_calls(*_: Any) -> None:
    """Begin no more of them: MPI is about to end. One that is under way ends before."""
    held = _calling.acquire(timeout=_STOP_S)
    _stopped.set()
    if held:
        _calling.release()


def waiting_longer_than(seconds: float) -> list[str]:
    """What threads of this rank have been waiting for so long: each as ``sum over n, for loss = ... (train.py, 7)``."""
    now, frames = time.monotonic(), sys._current_frames()
    long = [(thread, describe) for thread, (since, describe) in tuple(waits.items()) if now - since > seconds]
    return [f"{describe()}, for {_described(frames.get(thread))}" for thread, describe in long]


def _start() -> None:
    if _started.acquire(blocking=False):
        threading.Thread(target=_watch, name="distconv-watchdog", daemon=True).start()


def know(processes: Mapping[int, int]) -> None:
    """Rank and process id of the ranks on this node: a report then names those that do nothing any more."""
    _processes.update(processes)


def _watch() -> None:
    pause = min(PAUSE_S, timeout_s / 4) if timeout_s else PAUSE_S
    while True:
        time.sleep(pause)
        with _calling:
            for each_time in () if _stopped.is_set() else tuple(_calls):
                each_time()
        now = time.monotonic()
        now_waiting = current_waits()
        _noted.intersection_update(wait[:2] for wait in now_waiting)
        for thread, since, describe in now_waiting:
            if timeout_s and now - since > timeout_s:
                _end(now - since, describe(), sys._current_frames().get(thread))
            elif not _at_end and now - since > notice_s and (thread, since) not in _noted:
                _noted.add((thread, since))
                _notice(now - since, describe(), sys._current_frames().get(thread))


def _end(waited: float, what: str, frame: FrameType | None) -> None:
    print(
        f"distconv: rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} has waited {waited:.0f} s in {what}, for\n"
        f"    {_described(frame)}\n"
        f"{_idle() or _UNKNOWN}ending the job "
        f"(raise DISTCONV_TIMEOUT_S={timeout_s:g} if this wait is meant to be long)",
        file=sys.stderr,
        flush=True,
    )
    for report in _at_end:
        report()
    if not _at_end:
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
    # Ranks that wait elsewhere began to at about the same time: their reports say what was not called here.
    time.sleep(_OTHERS_S)
    abort(ABORT_CODE)


def _notice(waited: float, what: str, frame: FrameType | None) -> None:
    """Report of a rank that no other rank answers: before the first grid, or without MPI_THREAD_MULTIPLE."""
    has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    why = "this MPI has no MPI_THREAD_MULTIPLE"
    if has_threads:
        why = "they have made no grid with it, or failed before that (python -m mpi4py SCRIPT ends the job then)"
    print(
        f"distconv: rank {MPI.COMM_WORLD.rank} has waited {waited:.0f} s in {what}, for\n    {_described(frame)}\n"
        f"    {_idle()}it cannot see where the other ranks are: {why}\n{what_ends_it()}",
        file=sys.stderr,
        flush=True,
    )


def _described(frame: FrameType | None) -> str:
    return call_stack.described(frame) if frame is not None else "a thread that is gone"


def what_ends_it() -> str:
    """The line of a report that says when the job ends, if it does."""
    return f"    (the job ends when a rank has waited DISTCONV_TIMEOUT_S={timeout_s:g} seconds)" if timeout_s else ""


def why_silent(ranks: Iterable[int]) -> str:
    """Why ``ranks`` do not answer, as a clause that follows their numbers."""
    known = [
        f"rank {rank} (process {_processes[rank]}) is {_state(_processes[rank])}"
        for rank in ranks
        if rank in _processes and _state(_processes[rank])
    ]
    reason = "; ".join(known) or "a long call may keep other threads from running (Python's interpreter lock)"
    return f"no answer: {reason}"


def _idle() -> str:
    """The ranks on this node that cannot come, since their processes are stopped or gone."""
    states = [f"rank {rank} (process {pid}) is {state}; " for rank, pid in _processes.items() if (state := _state(pid))]
    return "".join(states)


def _state(pid: int) -> str:
    """``stopped`` or ``gone``; nothing of a process that runs, or where the system does not tell."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "")


def abort(code: int) -> None:
    """End the job. A launcher that is told so at once may drop what was just written to stderr."""
    time.sleep(_LAST_WORDS_S)
    MPI.COMM_WORLD.Abort(code)
