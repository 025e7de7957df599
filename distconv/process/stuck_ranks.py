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

_SHOWN_GROUPS = 8
"""Groups of ranks that a report lists."""

node_processes: dict[int, int] = {}
"""Process id of each rank on this node: reports name processes that are stopped or gone."""


@dataclass(frozen=True)
class RankState:
    """Current activity of a rank. It is sent to the rank that reports."""

    position: Position
    wait: str = ""
    """Description of its wait; "" if it waits for no other rank, as far as distconv can determine."""
    waited_s: float = 0.0
    has_left: bool = False
    """True if the rank has reached the end of its program. Otherwise it is running."""
    instruction: object = None
    """Frame and instruction of the main thread; if they change, the rank is running."""
    group: int = 0
    """Digest of the ranks that share grids with this one."""

    @property
    def location(self) -> tuple[object, ...]:
        """Value that is equal for ranks at the same call."""
        return self.position.call, self.position.lines, bool(self.wait), self.has_left

    def what(self) -> str:
        """Return the call, or what else the rank does, in a few words."""
        return "the end of its program" if self.has_left else self.position.call or "user code"

    def __str__(self) -> str:
        if self.has_left:
            return "has come to the end of its program"
        waits = f", waiting {self.waited_s:.0f} s in {self.wait}" if self.wait else ""
        return f"in {self.what()}{waits}\n        {self.position}"


def current_state(waits: Sequence[tuple[int, float, Callable[[], str]]], group: int, *, has_left: bool) -> RankState:
    """Return the current activity of this rank.

    Parameters
    ----------
    waits : sequence of tuple
        Its waits: thread, start by ``time.monotonic``, and a function that returns the description.
    group : int
        Digest of the ranks that share grids with this one.
    has_left : bool
        True if this rank has reached the end of its program. Otherwise it is running.

    Returns
    -------
    RankState
        The state.
    """
    main = threading.main_thread().ident or 0
    # The main thread's wait, or the oldest: torch may run a backward pass in a thread of its own.
    waits = sorted(waits, key=lambda wait: (wait[0] != main, wait[1]))
    frame = sys._current_frames().get(main)
    thread, since, describe = waits[0] if waits else (0, time.monotonic(), str)
    position, instruction = Position(), None
    if frame is not None and not has_left:
        position = call_stack.position(frame, blocked=bool(waits) and thread == main)
        instruction = id(frame), frame.f_lasti  # the frame itself would keep its variables alive
    return RankState(position, _text(describe), time.monotonic() - since, has_left, instruction, group)


def _text(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except Exception:  # the wait has just ended, and its objects are changing: that must not end the watchdog
        return "a wait that has just ended"


def print_to_stderr(text: str) -> None:
    """Print ``text`` to stderr at once."""
    print(text, file=sys.stderr, flush=True)


def print_stacks() -> None:
    """Print the stacks of all threads of this rank as one string, since all ranks write to one terminal."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        print_to_stderr(f"distconv: stacks of rank {MPI.COMM_WORLD.rank}\n{file.read()}")


def describe_thread(thread: int) -> str:
    """Return the user's call that ``thread`` is in."""
    frame = sys._current_frames().get(thread)
    return call_stack.describe_call(frame) if frame is not None else "a thread that is gone"


def format_isolated_report(waited: float, describe: Callable[[], str], thread: int, ending: str) -> str:
    """Return the report of a rank that cannot communicate with other ranks.

    Parameters
    ----------
    waited : float
        Seconds that it has waited.
    describe : callable
        Returns the description of the wait.
    thread : int
        The waiting thread.
    ending : str
        Last line of the report.

    Returns
    -------
    str
        The report.
    """
    why = "this MPI has no MPI_THREAD_MULTIPLE"
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        why = "they have made no grid with it, or failed before that (python -m mpi4py SCRIPT ends the job then)"
    return (
        f"distconv: rank {MPI.COMM_WORLD.rank} has waited {waited:.0f} s in {describe()}, for\n"
        f"    {describe_thread(thread)}\n"
        f"    {describe_dead_ranks()}it cannot see where the other ranks are: {why}\n{ending}"
    )


def format_report(states: dict[int, RankState | None], ending: str) -> str:
    """Return the report of this rank.

    Parameters
    ----------
    states : dict of int to RankState or None
        State of each rank, by its rank in MPI.COMM_WORLD, this one included; None for a rank that does not answer.
    ending : str
        Last line of the report, or "".

    Returns
    -------
    str
        The report: the wait, and the groups of ranks that are at the same call.
    """
    me = MPI.COMM_WORLD.rank
    own = states[me]
    assert own is not None
    states = dict(sorted(states.items()))
    groups: dict[object, list[int]] = {}
    for rank, state in states.items():
        # Ranks that do not answer are a group of their own.
        groups.setdefault(state and state.location, []).append(rank)
    lines = [
        f"distconv: rank {me} has waited {own.waited_s:.0f} s in {own.wait}; {_describe_other_ranks(groups, states)}"
    ]
    for ranks in list(groups.values())[:_SHOWN_GROUPS]:
        lines.append(f"    {call_stack.format_ranks(ranks)} {states[ranks[0]] or _explain_silence(ranks)}")
    unseen = MPI.COMM_WORLD.size - len(states)
    if unseen > 0:
        lines.append(
            f"    {unseen} more rank{'s' if unseen > 1 else ''} of the job made no grid with these: pass comm= to "
            "calls without them"
        )
    if len(groups) > _SHOWN_GROUPS:
        lines.append(f"    and {len(groups) - _SHOWN_GROUPS} other places")
    return "\n".join([*lines, *filter(None, [ending])])


def _describe_other_ranks(groups: dict[object, list[int]], states: dict[int, RankState | None]) -> str:
    """Return which ranks are not where most of the waiting ranks are."""
    waiting = [
        ranks for ranks in groups.values() if (current_state := states[ranks[0]]) is not None and current_state.wait
    ]
    largest = max(map(len, waiting), default=0)
    most = [ranks for ranks in waiting if len(ranks) == largest]
    others = [ranks for ranks in groups.values() if ranks not in waiting] or [
        ranks for ranks in groups.values() if len(most) > 1 or ranks not in most
    ]
    if len(groups) == 1:
        return "all ranks wait in the same call"
    named = [f"{call_stack.format_ranks(ranks)} {_where(states[ranks[0]])}" for ranks in others[:_SHOWN_GROUPS]]
    if len(most) > 1 and others == list(groups.values()):
        return f"the ranks are in different calls: {'; '.join(named)}"
    return f"elsewhere: {'; '.join(named)}"


def _where(state: RankState | None) -> str:
    if state is None:
        return "(no answer)"
    where = state.position.where
    return f"in {state.what()}{f' at {where}' if where and not state.has_left else ''}"


def _explain_silence(ranks: Iterable[int]) -> str:
    """Return why ``ranks`` do not answer, as a clause that follows their numbers."""
    known = [
        f"rank {rank} (process {node_processes[rank]}) is {current_state}"
        for rank in ranks
        if (current_state := _process_state(rank))
    ]
    reason = "; ".join(known) or "a long call may keep other threads from running (Python's interpreter lock)"
    return f"no answer: {reason}"


def describe_dead_ranks() -> str:
    """Return which ranks of this node are stopped or gone, to begin a sentence with; "" if none is."""
    return "".join(
        f"rank {rank} (process {pid}) is {current_state}; "
        for rank, pid in node_processes.items()
        if (current_state := _process_state(rank))
    )


def _process_state(rank: int) -> str:
    """Return "stopped" or "gone"; "" for a process that runs, or if the system does not report it."""
    pid = node_processes.get(rank)
    if pid is None or not Path("/proc/self/stat").exists():
        return ""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "")
