"""The watchdog: reports ranks that wait for long, and ends the job when a wait lasts too long.

A wait in MPI for a message that is never sent does not return, and signal handlers do not run during it. So waits are
entered in a table (:class:`waiting`), which a daemon thread checks. The cause of a wait is the position of another
rank. So the threads of the ranks exchange messages over their own communicators, if MPI has ``MPI_THREAD_MULTIPLE``;
the main threads take no part.

1. A rank whose wait is ``notice_s`` old asks all ranks where they are. Ranks ask one after the other, and a rank that
   has been asked about its wait does not ask about the same one.
2. Each rank answers with its wait or its call, and with the lines of the user's script that it is at.
3. The rank that asked prints the answers (:mod:`.stuck_ranks`), with the ranks that are elsewhere or do not answer.
4. After ``DISTCONV_TIMEOUT_S`` the rank asks once more, each rank prints the stacks of its threads, and the job ends.
5. A rank that has reached the end of its program waits for the others, and asks every second. Its wait begins again
   whenever another rank is found at another place. If all others wait, no message will come, and the job ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mpi4py import MPI

from distconv.process import stuck_ranks
from distconv.process.environment import TIMEOUT_S
from distconv.process.profiling import section
from distconv.process.stuck_ranks import RankState, print_to_stderr

ABORT_CODE = 75
"""Exit code of a job that the watchdog ended (EX_TEMPFAIL)."""

NOTICE_S = 30.0
"""Seconds after which a wait is reported, with the positions of the other ranks."""

PAUSE_S = 0.1
"""Maximum of the seconds between two checks."""

_ANSWERS_S = 1.0
"""Seconds in which ranks must answer: their threads check for messages ten times in it."""

_TURN_S, _TURNS = 0.5, 4
"""Seconds by which each rank asks later than the rank before it, and the maximum number of such delays.

The question of an earlier rank often covers the wait of a later one, which then does not ask.
"""

_STUCK_S = 1.0
"""Seconds after which a wait may be for a rank that has reached its end; the interval at which that rank asks."""

_OTHERS_S = 1.5
"""Seconds in which other ranks may print their own reports before the job ends."""

_STOP_S = 1.0
"""Seconds for which the end of MPI waits for a check that is running."""

_LAST_WORDS_S = 0.2
"""Seconds in which a launcher may pass on what was printed."""

_ASK, _ANSWER, _STACKS = 3, 4, 5
"""Message tags: a question where the receiver is, its answer, and a question that also prints its stacks."""

_UNKNOWN = (
    "which other ranks have perhaps not called; DISTCONV_CHECK=all reports at once where ranks call different "
    "operations; "
)

timeout_s = TIMEOUT_S.value_or_default()
notice_s = min(NOTICE_S, timeout_s / 2) if timeout_s else NOTICE_S

Wait = tuple[float, Callable[[], str]]
"""Start of a wait by ``time.monotonic``, and a function that returns its description."""

waits: dict[int, Wait] = {}
"""The current wait of each thread that waits."""

_wait_sources: list[Callable[[], Iterable[Wait]]] = []
_started = threading.Lock()
_check_lock = threading.Lock()
_stopped = threading.Event()


class waiting:
    """A context manager that enters a wait of this thread in the table.

    Parameters
    ----------
    describe : callable
        Returns the description of the wait; it is called only for a report.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe, self._section = describe, section("wait")
        self._outer: Wait | None = None

    def __enter__(self) -> None:
        self._section.__enter__()
        start()
        # Of nested waits (an all-reduce within an agreement) the table has the inner one. The outer one is restored.
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


def register_wait_source(waits: Callable[[], Iterable[Wait]]) -> None:
    """Register a function that returns waits that block no thread, such as those of a GPU.

    Parameters
    ----------
    waits : callable
        Returns the waits; the watchdog's thread calls it at each check.
    """
    if timeout_s and waits not in _wait_sources:
        _wait_sources.append(waits)
        start()


def current_waits() -> list[tuple[int, float, Callable[[], str]]]:
    """Return this rank's waits: thread, start by ``time.monotonic``, and a function that describes the wait."""
    # Nothing blocks on a GPU's wait, so it is reported for the main thread.
    by_gpu = [(threading.main_thread().ident or 0, *wait) for source in _wait_sources for wait in source()]
    # tuple() copies in one step: other threads change the table at the same time.
    return [*((thread, *wait) for thread, wait in tuple(waits.items())), *by_gpu]


def start() -> None:
    """Start the watchdog's thread, once."""
    if _started.acquire(blocking=False):
        threading.Thread(target=_watch, name="distconv-watchdog", daemon=True).start()


def stop(*_: Any) -> None:
    """Stop checking, since MPI is about to end; wait for a check that is running."""
    held = _check_lock.acquire(timeout=_STOP_S)
    _stopped.set()
    if held:
        _check_lock.release()


def describe_timeout() -> str:
    """Return the line of a report that says when the job ends, or ""."""
    return f"    (the job ends when a rank has waited DISTCONV_TIMEOUT_S={timeout_s:g} seconds)" if timeout_s else ""


def abort(code: int) -> None:
    """End the job.

    MPI_Abort comes after a pause: a launcher may drop what was written to stderr just before it.

    Parameters
    ----------
    code : int
        Exit code of the job.
    """
    time.sleep(_LAST_WORDS_S)
    MPI.COMM_WORLD.Abort(code)


def end_job(why: str, code: int) -> None:
    """Print the reason to stderr, and end the job.

    Parameters
    ----------
    why : str
        The reason.
    code : int
        Exit code of the job.
    """
    print_to_stderr(f"distconv: {why}; ending the job")
    abort(code)


def _watch() -> None:
    pause = min(PAUSE_S, timeout_s / 4) if timeout_s else PAUSE_S
    while True:
        # Outside of the lock, which stop() must get in the meantime.
        time.sleep(pause)
        with _check_lock:
            if not _stopped.is_set():
                reporter.check_waits()


class ExitChannel:
    """A communicator whose ranks report to each other and coordinate their exits. Collective to make."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.group = self.comm.Get_group()
        self.world_ranks: list[int] = self.comm.allgather(MPI.COMM_WORLD.rank)

    def has_all_of(self, comm: MPI.Intracomm) -> bool:
        """Return True if every rank of ``comm`` is on this channel."""
        # By groups, which needs no messages: ranks call this at different times.
        group = comm.Get_group()
        both = MPI.Group.Intersection(group, self.group)
        contained = bool(both.size == group.size)
        both.Free()
        group.Free()
        return contained

    def arrived(self, tag: int) -> dict[int, Any]:
        """Return the last message with this tag of each rank from which one has arrived."""
        arrived, status = {}, MPI.Status()
        while self.comm.Iprobe(tag=tag):
            message = self.comm.recv(tag=tag, status=status)
            # Of several messages of a rank the last one counts; messages of two ranks do not overtake each other.
            arrived[status.source] = message
        return arrived


class _Question(NamedTuple):
    number: int
    """Serial number: an answer to an earlier question may come late."""
    covers: bool
    """True if the answers are printed: the receiver then does not ask about its present waits. Otherwise it may."""
    left: int = 0
    """Digest of the ranks that the sender asks, if it has reached the end of its program; otherwise 0."""


class StuckRankReporter:
    """The watchdog of one rank: asks, answers and prints, in the watchdog's thread."""

    def __init__(self) -> None:
        self.channels: list[ExitChannel] = []
        """Channels to the other ranks; none before the first grid, and without ``MPI_THREAD_MULTIPLE``."""
        self.has_left = False
        """True once this rank has reached the end of its program. Otherwise it is running."""
        self._seen: set[tuple[int, float]] = set()
        """Waits of this rank that a report has covered: thread and since when."""
        self._sent: list[MPI.Request] = []
        self._asked_at = 0.0
        self._question: _Question | None = None
        """The question whose answers are awaited."""
        self._count = 0
        self._answers: dict[int, RankState] = {}
        self._stacks_printed = False
        self._others: tuple[object, ...] = ()
        """Last known positions of the running ranks, if this rank has reached its end."""
        self._is_spared = False
        """True if a lower rank has reached its end, too, and asks instead of this one. Otherwise this one asks."""

    def _peers(self) -> dict[int, tuple[MPI.Intracomm, int]]:
        """Return a communicator and a rank in it for each other rank, by its rank in MPI.COMM_WORLD."""
        found: dict[int, tuple[MPI.Intracomm, int]] = {}
        for channel in self.channels:
            for rank, world_rank in enumerate(channel.world_ranks):
                if rank != channel.comm.rank:
                    found.setdefault(world_rank, (channel.comm, rank))
        return found

    def _group(self) -> int:
        # The hash of integers is the same in all processes, unlike that of strings.
        return hash(frozenset({MPI.COMM_WORLD.rank, *self._peers()}))

    def _state(self) -> RankState:
        return stuck_ranks.current_state(current_waits(), self._group(), has_left=self.has_left)

    def check_waits(self) -> None:
        """Run the steps in the module's docstring as far as they are due. The watchdog's thread calls it regularly."""
        self._receive()
        # MPI may read a message until its request is complete.
        self._sent = [request for request in self._sent if not request.Test()]
        if self._is_spared:
            self._wait_again()
        now, waits = time.monotonic(), current_waits()
        # Overdue waits first: they end the job.
        for thread, since, describe in waits:
            if timeout_s and now - since > timeout_s:
                self._end(now - since, describe, thread)
        # Waits that have ended are forgotten. A later wait of the same thread has another start.
        self._seen &= {wait[:2] for wait in waits}
        turn = min(_TURNS, min((channel.comm.rank for channel in self.channels), default=0)) * _TURN_S
        late = [wait for wait in waits if wait[:2] not in self._seen and now - wait[1] > notice_s + turn]
        if self._question is not None:
            if self._is_answered(now):
                covers, self._question = self._question.covers, None
                if self.has_left:
                    self._follow_others()
                if covers and any(wait[:2] in self._seen for wait in current_waits()):
                    print_to_stderr(self._report(describe_timeout()))
        elif late and not self.channels:
            self._seen.add(late[0][:2])
            print_to_stderr(
                stuck_ranks.format_isolated_report(now - late[0][1], late[0][2], late[0][0], describe_timeout())
            )
        elif late or (self.has_left and not self._is_spared and now > self._asked_at + _STUCK_S + turn):
            self._ask(_ASK, covers=bool(late))

    def _ask(self, tag: int, *, covers: bool) -> None:
        if covers:
            self._cover()
        self._answers, self._asked_at = {}, time.monotonic()
        self._count += 1
        self._question = _Question(self._count, covers, self._group() if self.has_left else 0)
        self._sent += [comm.isend(self._question, rank, tag) for comm, rank in self._peers().values()]

    def _cover(self) -> None:
        """Mark this rank's waits as reported, except those that have only just begun."""
        since = time.monotonic() - notice_s / 2
        self._seen = {wait[:2] for wait in current_waits() if wait[1] < since}

    def _is_answered(self, now: float) -> bool:
        return len(self._answers) == len(self._peers()) or self._asked_at < now - _ANSWERS_S

    def _receive(self) -> None:
        for channel in self.channels:
            for tag in (_ASK, _STACKS):
                for rank, question in channel.arrived(tag).items():
                    if question.covers:
                        self._cover()
                    lower = channel.world_ranks[rank] < MPI.COMM_WORLD.rank
                    self._is_spared |= self.has_left and lower and question.left == self._group()
                    self._sent.append(channel.comm.isend((question.number, self._state()), rank, _ANSWER))
                    if tag == _STACKS:
                        self._print_stacks()
            for rank, (number, state) in channel.arrived(_ANSWER).items():
                # An answer to an earlier question may come after its time.
                if number == self._count:
                    self._answers[channel.world_ranks[rank]] = state

    # -- the end of a job ---------------------------------------------------------------------------------------------

    def _follow_others(self) -> None:
        """End the job if all ranks that are still running wait, and were found in the same waits twice.

        A rank may also wait for a rank with which this one shares no grid. So it counts as stuck only if it has
        channels to the same ranks.
        """
        staying = {rank: state for rank, state in self._answers.items() if not state.has_left}
        stuck = len(self._answers) == len(self._peers()) and all(
            state.waited_s > _STUCK_S and state.group == self._group() for state in staying.values()
        )
        others = tuple((rank, state.wait if stuck else state.instruction) for rank, state in sorted(staying.items()))
        if others != self._others:
            self._others = others
            self._wait_again()
        elif stuck and staying:
            said = "; ".join(
                f"rank {rank} waits in {state.wait} at {state.position}" for rank, state in sorted(staying.items())[:4]
            )
            end_job(f"rank {MPI.COMM_WORLD.rank} has come to the end of its program, but {said}", ABORT_CODE)

    def _wait_again(self) -> None:
        """Restart the clock of the wait for the other ranks to end."""
        main = threading.main_thread().ident or 0
        if main in waits:
            waits[main] = (time.monotonic(), waits[main][1])

    def _end(self, waited: float, describe: Callable[[], str], thread: int) -> None:
        print_to_stderr(
            f"distconv: rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} has waited {waited:.0f} s in {describe()}, "
            f"for\n    {stuck_ranks.describe_thread(thread)}\n"
            f"{stuck_ranks.describe_dead_ranks() or _UNKNOWN}ending the job "
            f"(raise DISTCONV_TIMEOUT_S={timeout_s:g} if this wait is meant to be long)"
        )
        # Another rank ends the job, and has asked this one: it answers, and prints its stacks only once.
        if self._stacks_printed:
            self._receive()
        elif self.channels:
            self._ask(_STACKS, covers=True)
            while not self._is_answered(time.monotonic()):
                time.sleep(PAUSE_S / 5)
                self._receive()
            print_to_stderr(self._report(""))
        self._print_stacks()
        # Ranks that wait elsewhere began to at about the same time: their reports say what was not called here.
        time.sleep(_OTHERS_S)
        abort(ABORT_CODE)

    def _print_stacks(self) -> None:
        if not self._stacks_printed:
            self._stacks_printed = True
            stuck_ranks.print_stacks()

    def _report(self, ending: str) -> str:
        states: dict[int, RankState | None] = {rank: self._answers.get(rank) for rank in self._peers()}
        states[MPI.COMM_WORLD.rank] = self._state()
        return stuck_ranks.format_report(states, ending)


reporter = StuckRankReporter()
"""The reporter of this process."""
