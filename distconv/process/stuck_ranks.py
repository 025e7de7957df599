"""Reports of stuck ranks: where every rank is while one of them waits for long. The watchdog prints them."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from distconv.process import call_stack
from distconv.process.call_stack import Position

_SHOWN = 8
"""Groups of ranks that a report lists."""

processes: dict[int, int] = {}
"""Rank and process of all ranks on this node: reports name those that are stopped or gone."""


@dataclass(frozen=True)
class State:
    """Current activity of a rank."""

    position: Position
    wait: str = ""
    """Its wait; empty if it waits for no other rank, as far as distconv can see."""
    waited_s: float = 0.0
    has_left: bool = False
    instruction: object = None
    """Frame and instruction that the main thread is at: another one shows that it runs."""
    group: int = 0
    """Digest of the ranks that share grids with this one."""

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for ranks that are at the same call."""
        return self.position.call, self.position.lines, bool(self.wait), self.has_left

    def what(self) -> str:
        """Return the call, or what else the rank does, in a few words."""
        return "the end of its program" if self.has_left else self.position.call or "user code"

    def __str__(self) -> str:
        if self.has_left:
            return "has come to the end of its program"
        waits = f", waiting {self.waited_s:.0f} s in {self.wait}" if self.wait else ""
        return f"in {self.what()}{waits}\n        {self.position}"


def state(waits: Sequence[tuple[int, float, Callable[[], str]]], group: int, *, has_left: bool) -> State:
    """Return the current activity of this rank, which is in ``waits``: thread, since when, and what for."""
    main = threading.main_thread().ident or 0
    # The main thread's wait, or the oldest: torch may run a backward pass in a thread of its own.
    waits = sorted(waits, key=lambda wait: (wait[0] != main, wait[1]))
    frame = sys._current_frames().get(main)
    thread, since, describe = waits[0] if waits else (0, time.monotonic(), str)
    position, instruction = Position(), None
    if frame is not None and not has_left:
        position = call_stack.position(frame, blocked=bool(waits) and thread == main)
        instruction = id(frame), frame.f_lasti  # the frame itself would keep what it holds
    return State(position, _text(describe), time.monotonic() - since, has_left, instruction, group)


def _text(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except Exception:  # the wait has ended, and what describes it is changing: that must not end the watchdog
        return "a wait that has just ended"


def show(text: str) -> None:
    """Print ``text`` to stderr."""
    print(text, file=sys.stderr, flush=True)


def show_stacks() -> None:
    """Print the stacks of all threads of this rank, in one piece: all ranks write to one terminal."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        show(f"distconv: stacks of rank {MPI.COMM_WORLD.rank}\n{file.read()}")


def call_of(thread: int) -> str:
    """Return what the user called in ``thread``."""
    frame = sys._current_frames().get(thread)
    return call_stack.described(frame) if frame is not None else "a thread that is gone"


def alone(waited: float, describe: Callable[[], str], thread: int, ending: str) -> str:
    """Return the report of a rank that no other rank answers."""
    why = "this MPI has no MPI_THREAD_MULTIPLE"
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        why = "they have made no grid with it, or failed before that (python -m mpi4py SCRIPT ends the job then)"
    return (
        f"distconv: rank {MPI.COMM_WORLD.rank} has waited {waited:.0f} s in {describe()}, for\n"
        f"    {call_of(thread)}\n    {idle()}it cannot see where the other ranks are: {why}\n{ending}"
    )


def report(states: dict[int, State | None], ending: str) -> str:
    """Return the report of this rank, given the states of all ranks; None for a rank that does not answer."""
    me = MPI.COMM_WORLD.rank
    own = states[me]
    assert own is not None
    states = dict(sorted(states.items()))
    groups: dict[object, list[int]] = {}
    for rank, state in states.items():
        groups.setdefault(state and state.place, []).append(rank)
    lines = [f"distconv: rank {me} has waited {own.waited_s:.0f} s in {own.wait}; {_elsewhere(groups, states)}"]
    for ranks in list(groups.values())[:_SHOWN]:
        lines.append(f"    {call_stack.ranks(ranks)} {states[ranks[0]] or _why_silent(ranks)}")
    unseen = MPI.COMM_WORLD.size - len(states)
    if unseen > 0:
        lines.append(
            f"    {unseen} more rank{'s' if unseen > 1 else ''} of the job made no grid with these: pass comm= to "
            "calls without them"
        )
    if len(groups) > _SHOWN:
        lines.append(f"    and {len(groups) - _SHOWN} other places")
    return "\n".join([*lines, *filter(None, [ending])])


def _elsewhere(groups: dict[object, list[int]], states: dict[int, State | None]) -> str:
    """Name the ranks that are not where most of the waiting ones are."""
    waiting = [ranks for ranks in groups.values() if (state := states[ranks[0]]) is not None and state.wait]
    largest = max(map(len, waiting), default=0)
    most = [ranks for ranks in waiting if len(ranks) == largest]
    others = [ranks for ranks in groups.values() if ranks not in waiting] or [
        ranks for ranks in groups.values() if len(most) > 1 or ranks not in most
    ]
    if len(groups) == 1:
        return "all ranks wait in the same call"
    named = [f"{call_stack.ranks(ranks)} {_where(states[ranks[0]])}" for ranks in others[:_SHOWN]]
    if len(most) > 1 and others == list(groups.values()):
        return f"the ranks are in different calls: {'; '.join(named)}"
    return f"elsewhere: {'; '.join(named)}"


def _where(state: State | None) -> str:
    if state is None:
        return "(no answer)"
    where = state.position.where
    return f"in {state.what()}{f' at {where}' if where and not state.has_left else ''}"


def _why_silent(ranks: Iterable[int]) -> str:
    """Say why ``ranks`` do not answer, as a clause that follows their numbers."""
    known = [f"rank {rank} (process {processes[rank]}) is {state}" for rank in ranks if (state := _process_state(rank))]
    reason = "; ".join(known) or "a long call may keep other threads from running (Python's interpreter lock)"
    return f"no answer: {reason}"


def idle() -> str:
    """Name the ranks on this node that cannot come, since their processes are stopped or gone."""
    return "".join(
        f"rank {rank} (process {pid}) is {state}; "
        for rank, pid in processes.items()
        if (state := _process_state(rank))
    )


def _process_state(rank: int) -> str:
    """Return ``stopped`` or ``gone``; empty for a process that runs, or where the system does not say."""
    pid = processes.get(rank)
    if pid is None or not Path("/proc/self/stat").exists():
        return ""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "")
