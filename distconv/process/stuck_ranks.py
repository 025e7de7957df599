"""Reports of stuck ranks: where every rank is while one of them waits for long.

A rank that waits cannot see why: the reason is where another rank is. So the watchdog threads of the ranks exchange
messages, over the communicator on which the ranks coordinate their exits; the main threads take no part.

1. A rank whose wait is ``watchdog.notice_s`` old asks all ranks where they are; ranks do so one after the other, and
   a rank that has been asked about its wait does not ask about the same one.
2. Each rank answers with its wait or its call, and with the lines of the user's script that it is at.
3. The rank that asked prints the answers, and which ranks are elsewhere. A rank that does not answer is listed, too.
4. When the watchdog ends the job, the rank that ends it asks once more, and each rank prints the stacks of its threads.
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpi4py import MPI

from distconv.process import call_stack, endings, watchdog
from distconv.process.call_stack import Position

_ASK, _ANSWER, _STACKS = 3, 4, 5
"""Tags: a rank asks where the receiver is; the answer; the receiver prints its stacks, too. Exits have 1 and 2."""

_ANSWERS_S = 1.0
"""How long the others get to answer: their threads look four times in it."""

_TURN_S, _TURNS = 0.5, 4
"""A rank asks so much later than the one before it, which may spare it the question; from the fifth on together."""

_SHOWN = 8
"""Groups of ranks that a report lists."""


@dataclass(frozen=True)
class State:
    """Current activity of a rank."""

    position: Position
    wait: str = ""
    """Its wait; empty if it waits for no other rank, as far as distconv can see."""
    waited_s: float = 0.0
    has_left: bool = False

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for ranks that are at the same call."""
        return self.position.call, self.position.lines, bool(self.wait), self.has_left

    def what(self) -> str:
        """The call, or what else the rank does, in a few words."""
        return "the end of its program" if self.has_left else self.position.call or "user code"

    def __str__(self) -> str:
        if self.has_left:
            return "has come to the end of its program"
        waits = f", waiting {self.waited_s:.0f} s in {self.wait}" if self.wait else ""
        return f"in {self.what()}{waits}\n        {self.position}"


def _state() -> State:
    """Return the current activity of this rank."""
    if endings.is_leaving():
        return State(Position())
    main = threading.main_thread().ident or 0
    # The main thread's wait, or the oldest: torch may run a backward pass in a thread of its own.
    waits = sorted(watchdog.current_waits(), key=lambda wait: (wait[0] != main, wait[1]))
    frame = sys._current_frames().get(main)
    if frame is None:
        return State(Position())
    if not waits:
        return State(call_stack.position(frame))
    thread, since, describe = waits[0]
    return State(call_stack.position(frame, blocked=thread == main), _text(describe), time.monotonic() - since)


def _text(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except Exception:  # the wait has ended, and what describes it is changing: that must not end the watchdog
        return "a wait that has just ended"


class Reporter:
    """The part of one rank: asks, answers and prints, in the watchdog's thread."""

    def __init__(self) -> None:
        self._channels: list[endings.Channel] = []
        self._seen: set[tuple[int, float]] = set()
        """Waits of this rank that a report has covered: thread and since when."""
        self._sent: list[MPI.Request] = []
        self._asked_at: float | None = None
        self._question = 0
        """Number of the last question: an answer to an earlier one may come late."""
        self._answers: dict[int, State] = {}
        self._stacks_printed = False

    def add(self, channel: endings.Channel) -> None:
        """Include the ranks of ``channel``."""
        self._channels.append(channel)
        if len(self._channels) == 1:
            watchdog.call(self.look)
            watchdog.at_end(self.final)

    def _peers(self) -> dict[int, tuple[MPI.Intracomm, int]]:
        """How to reach the other ranks, by their number in the job."""
        found: dict[int, tuple[MPI.Intracomm, int]] = {}
        for channel in self._channels:
            for rank, world_rank in enumerate(channel.world_ranks):
                if rank != channel.comm.rank:
                    found.setdefault(world_rank, (channel.comm, rank))
        return found

    def look(self) -> None:
        """Answer who asks; ask if a wait has become long; print if the answers are there. To be called now and then."""
        self._receive()
        self._sent = [request for request in self._sent if not request.Test()]
        now, waits = time.monotonic(), watchdog.current_waits()
        self._seen &= {wait[:2] for wait in waits}
        turn = min(_TURNS, min(channel.comm.rank for channel in self._channels)) * _TURN_S
        late = [wait for wait in waits if wait[:2] not in self._seen and now - wait[1] > watchdog.notice_s + turn]
        if self._asked_at is None and late:
            self._ask(_ASK)
        elif self._asked_at is not None and self._is_answered(now):
            self._asked_at = None
            if any(wait[:2] in self._seen for wait in waits):
                _print(self._report(watchdog.what_ends_it()))

    def _ask(self, tag: int) -> None:
        self._cover()
        self._answers, self._asked_at = {}, time.monotonic()
        self._question += 1
        self._sent += [comm.isend(self._question, rank, tag) for comm, rank in self._peers().values()]

    def _cover(self) -> None:
        """Take this rank's waits for reported, but for those that have begun only now."""
        since = time.monotonic() - watchdog.notice_s / 2
        self._seen = {wait[:2] for wait in watchdog.current_waits() if wait[1] < since}

    def _is_answered(self, now: float) -> bool:
        return len(self._answers) == len(self._peers()) or (self._asked_at or 0.0) < now - _ANSWERS_S

    def _receive(self) -> None:
        for channel in self._channels:
            for tag in (_ASK, _STACKS):
                asking = endings.arrived(channel.comm, tag)
                if asking:
                    self._cover()
                    state = _state()
                    for rank, question in asking.items():
                        self._sent.append(channel.comm.isend((question, state), rank, _ANSWER))
                    if tag == _STACKS:
                        self._print_stacks()
            for rank, (question, state) in endings.arrived(channel.comm, _ANSWER).items():
                if question == self._question:
                    self._answers[channel.world_ranks[rank]] = state

    def final(self) -> None:
        """Report once more, with the stacks of all ranks: the job is about to end."""
        if self._stacks_printed or not self._channels:
            self._receive()
        else:
            self._ask(_STACKS)
            while not self._is_answered(time.monotonic()):
                time.sleep(watchdog.PAUSE_S / 5)
                self._receive()
            _print(self._report(""))
        self._print_stacks()

    def _print_stacks(self) -> None:
        if not self._stacks_printed:
            self._stacks_printed = True
            print_stacks()

    # -- the text of a report -----------------------------------------------------------------------------------------

    def _report(self, ending: str) -> str:
        me = MPI.COMM_WORLD.rank
        own = _state()
        states: dict[int, State | None] = {rank: self._answers.get(rank) for rank in sorted({me, *self._peers()})}
        states[me] = own
        groups: dict[object, list[int]] = {}
        for rank, state in states.items():
            groups.setdefault(state and state.place, []).append(rank)
        lines = [f"rank {me} has waited {own.waited_s:.0f} s in {own.wait}; {_elsewhere(groups, states)}"]
        for ranks in list(groups.values())[:_SHOWN]:
            state = states[ranks[0]]
            lines.append(f"    {call_stack.ranks(ranks)} {state or watchdog.why_silent(ranks)}")
        unseen = MPI.COMM_WORLD.size - len(states)
        if unseen > 0:
            lines.append(
                f"    {unseen} more rank{'s' if unseen > 1 else ''} of the job made no grid with these: pass comm= to "
                "calls without them"
            )
        if len(groups) > _SHOWN:
            lines.append(f"    and {len(groups) - _SHOWN} other places")
        return "\n".join([f"distconv: {lines[0]}", *lines[1:], *filter(None, [ending])])


def _elsewhere(groups: dict[object, list[int]], states: dict[int, State | None]) -> str:
    """The ranks that are not where most of the waiting ones are."""
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


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_stacks() -> None:
    """Print the stacks of all threads of this rank, in one piece: all ranks write to one terminal."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        _print(f"distconv: stacks of rank {MPI.COMM_WORLD.rank}\n{file.read()}")


reporter = Reporter()
"""The part of this process."""
