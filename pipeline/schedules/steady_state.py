"""Asynchronous schedules without an end: the actions of each rank in a step, and those that empty the pipeline.

A schedule of more mini-batches begins like one of fewer, and is periodic once the pipeline is full. A short schedule
thus contains all that a long run needs, with the numbers of mini-batches and versions shifted. The period is the least
number of mini-batches after which each stage has used all of its replicas equally often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import lcm
from typing import Any

from .actions import Action, Kind, Message, Schedule
from .registry import schedule
from .replay import Replay


class SteadyStream:
    """Asynchronous schedule for any number of mini-batches.

    In step m each rank advances as far as it can without a mini-batch after m, so no step waits for the next one.

    Parameters
    ----------
    name : str
        Name of the schedule.
    stages : int
        Number of stages.
    **options
        As in :func:`.schedule`.
    """

    def __init__(self, name: str, stages: int, **options: Any) -> None:
        self._make = lru_cache(maxsize=None)(lambda count: schedule(name, stages, count, **options))
        self.replicas = self._make(1).replicas
        self._period = lcm(*self.replicas)
        # A stage has at most twice as many mini-batches in flight as there are ranks. This schedule is longer, so it
        # has all forwards before the first B.
        in_flight = max(_forwards_before_backward(actions) for actions in self._make(4 * sum(self.replicas)).stages)
        # Number of a step from which on the pipeline is full and steps repeat. It is a multiple of the period, so that
        # shifted mini-batches keep their replicas.
        self._filled = -(-2 * in_flight // self._period) * self._period
        # The mini-batches after filled + period serve to keep the end of the schedule out of the steps in use.
        self.schedule = self._make(self._filled + 2 * self._period + in_flight)
        """A finite part of the schedule, long enough to contain every kind of action."""
        ranks = [(stage, replica) for stage, count in enumerate(self.replicas) for replica in range(count)]
        self._lists = {rank: self.schedule.replica_actions(*rank, self.replicas[rank[0]]) for rank in ranks}
        self._ends = _ends(self.schedule, self._lists, self._filled + self._period)
        self._completed = [self._count_updated(end) for end in self._ends]

    def step_actions(self, stage: int, replica: int, number: int) -> list[Action]:
        """Return the actions of one rank in step ``number``.

        Parameters
        ----------
        stage, replica : int
            The rank.
        number : int
            The step.

        Returns
        -------
        list of Action
        """
        equivalent = self._equivalent_step(number)
        start, stop = (self._end(stage, replica, last) for last in (equivalent - 1, equivalent))
        return self._shift_actions(self._lists[stage, replica][start:stop], number - equivalent)

    def remaining_actions(self, stage: int, replica: int, steps: int) -> list[Action]:
        """Return the actions that one rank still has to do after ``steps`` steps if no mini-batch follows.

        Parameters
        ----------
        stage, replica : int
            The rank.
        steps : int
            Number of steps that were done.

        Returns
        -------
        list of Action
        """
        equivalent = self._equivalent_step(steps - 1) + 1
        done = self._lists[stage, replica][: self._end(stage, replica, equivalent - 1)]
        # The schedule of exactly these mini-batches begins with the actions that were done. The others are left.
        left = []
        counts = Counter(map(_identity, done))
        for action in self._make(equivalent).replica_actions(stage, replica, self.replicas[stage]):
            if counts[_identity(action)]:
                counts[_identity(action)] -= 1
            else:
                left.append(action)
        return self._shift_actions(left, steps - equivalent)

    def completed(self, number: int) -> int:
        """Return the number of mini-batches that have updated every stage by the end of step ``number``."""
        equivalent = self._equivalent_step(number)
        return self._completed[equivalent] + number - equivalent

    def _count_updated(self, end: dict[tuple[int, int], int]) -> int:
        """Return this number if each rank is at ``end`` of its list. Replicas advance equally far."""
        return min(
            count * sum(action.kind is Kind.UPDATE for action in self._lists[stage, 0][: end[stage, 0]])
            for stage, count in enumerate(self.replicas)
        )

    def _end(self, stage: int, replica: int, number: int) -> int:
        """Return the position of one rank after step ``number`` (-1: before the first)."""
        return self._ends[number][stage, replica] if number >= 0 else 0

    def _equivalent_step(self, number: int) -> int:
        """Return the first step with the same fill of the pipeline, whose mini-batch has the same replicas."""
        return number if number < self._filled else self._filled + (number - self._filled) % self._period

    def _shift_actions(self, actions: list[Action], by: int) -> list[Action]:
        """Return the actions of one stage, ``by`` mini-batches later. ``by`` is a multiple of the period."""
        if not by:
            return actions
        shifted = []
        for action in actions:
            microbatch = None if action.microbatch is None else action.microbatch + by
            # A stage makes one version for each mini-batch of a replica; the period is a multiple of their number.
            version = None if action.version is None else action.version + by // self.replicas[action.stage]
            shifted.append(replace(action, microbatch=microbatch, version=version))
        return shifted


class _ScheduleRun(Replay[tuple[int, int]]):
    """Replay of a schedule: the position of each rank (stage, replica), and the messages that were made."""

    def __init__(self, schedule: Schedule, lists: Mapping[tuple[int, int], Sequence[Action]]) -> None:
        super().__init__(lists)
        self.schedule = schedule
        self.made: set[Message | None] = {None}

    def advance(self, rank: tuple[int, int], last: int) -> bool:
        """Do one action if it needs no mini-batch after ``last`` and its input is available."""
        action = self.next_action(rank)
        if action is None:
            return False
        # The other passes of a later mini-batch wait for its F through their inputs.
        if action.kind in (Kind.F, Kind.PREDICT) and action.microbatch is not None and action.microbatch > last:
            return False
        if self.schedule.received_input_of(action) not in self.made:
            return False
        advancing = [rank]
        if action.kind is Kind.UPDATE:
            # Replicas sum their gradients in an update, so all of them are at it before any can continue.
            advancing = [other for other in self.lists if other[0] == action.stage]
            heads = [self.next_action(other) for other in advancing]
            if any(head is None or (head.kind, head.version) != (action.kind, action.version) for head in heads):
                return False
        for other in advancing:
            self.at[other] += 1
        self.made.add(self.schedule.output_of(action))
        return True


def _ends(whole: Schedule, lists: dict[tuple[int, int], list[Action]], steps: int) -> list[dict[tuple[int, int], int]]:
    """Return how far each rank gets in each step."""
    run = _ScheduleRun(whole, lists)
    ends = []
    for number in range(steps):
        run.run(lambda rank, last=number: run.advance(rank, last))  # type: ignore[misc]
        ends.append(dict(run.at))
    return ends


def _identity(action: Action) -> Action:
    """Return an action without the mini-batch for which a STASH is kept.

    That mini-batch depends on the number of mini-batches of the schedule.
    """
    return replace(action, microbatch=None) if action.kind is Kind.STASH else action


def _forwards_before_backward(actions: list[Action]) -> int:
    first = next(index for index, action in enumerate(actions) if action.kind is Kind.B)
    return sum(action.kind is Kind.F for action in actions[:first])
