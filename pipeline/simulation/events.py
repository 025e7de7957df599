"""Event simulation of a schedule: ``simulate``.

The simulator reads the same lists of actions as the runtime, so both follow the same order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distconv.pipeline.schedules.actions import COMPUTE, Action, Kind, Message, Schedule, ScheduleError
from distconv.pipeline.schedules.per_stage import Cost
from distconv.pipeline.schedules.registry import per_stage_replicas, remake

from .costs import ScheduleCosts
from .span import Span
from .timeline import Timeline

OCCUPYING = COMPUTE | {Kind.UPDATE}
"""Actions that take time on a stage."""


def simulate(  # noqa: PLR0917 - a fixed public signature
    schedule: Schedule,
    forward: Cost,
    backward: Cost,
    weight: Cost | None = None,
    transfer: Cost = 0.0,
    update: Cost = 0.0,
    activation: Cost = 1.0,
    replicas: int | Sequence[int] | None = None,
) -> Timeline:
    """Simulate a schedule: each stage follows its list in order, and a pass waits for its input.

    All costs are one number, or one for each stage, in any unit of time.

    Source: Zhao et al. 2020 (BaPipe), 3.2, for asynchronous and synchronous execution.

    Parameters
    ----------
    schedule : Schedule
        Schedule to simulate.
    forward : float or sequence
        Forward pass of one micro-batch through all chunks of a stage.
    backward : float or sequence
        Full backward pass; with ``weight`` that of the input (dL/dx) alone.
    weight : float or sequence, optional
        Backward pass of the weights (dL/dw). By default, schedules with W spend half of ``backward`` on each.
    transfer : float or sequence
        Latency of the boundary after a stage, in both directions; after the last stage, back to the first between
        chunks. It occupies no rank. If the schedule hides transfers, it is the time on the link, which carries one
        message at a time in each direction, starting with the pass that makes the message.
    update : float or sequence
        Optimizer step.
    activation : float or sequence
        Memory that one micro-batch keeps on a stage, in any unit.
    replicas : int or sequence, optional
        Ranks of each stage, which take micro-batches round-robin and update together. Default: the schedule's. A
        schedule with updates for another number of replicas is made again.

    Returns
    -------
    Timeline
        Time of every pass. F and B of a concurrent schedule share their rank in proportion to their work.

    Raises
    ------
    ScheduleError
        If costs or counts do not fit, or lists wait for each other forever.
    """
    costs = ScheduleCosts.from_arguments(
        schedule, forward, backward, weight=weight, transfer=transfer, update=update, activation=activation
    )
    own = schedule.replicas or 1
    counts = per_stage_replicas(schedule.name, own if replicas is None else replicas, len(costs.forward))
    if schedule.asynchronous and counts != schedule.replicas:
        schedule = remake(schedule, replicas=counts)
    return _Simulation(schedule, costs, counts).run()


@dataclass
class _Track:
    """Actions that run one after the other: all of a rank, or its F and its B separately.

    ``required[k]``: passes of the other track that must have ended before action k begins.
    """

    actions: list[Action]
    required: list[int]
    next: int = 0
    ended: int = 0
    """Passes that have ended."""

    @property
    def next_action(self) -> Action | None:
        """Next action; it stays here while it runs."""
        return self.actions[self.next] if self.next < len(self.actions) else None


@dataclass
class _PassRun:
    """Running pass: its start, its work, and the remaining work in seconds of a full rank."""

    action: Action
    start: float
    work: float
    remaining: float


@dataclass
class _Rank:
    """One replica of one stage.

    ``running`` has the running pass of each track, by its index, and last changed at time ``changed``. ``epoch`` counts
    these changes. ``held`` counts the forward passes whose activations are held, one for each micro-batch and chunk.
    """

    stage: int
    replica: int
    tracks: list[_Track]
    running: dict[int, _PassRun] = field(default_factory=dict)
    changed: float = 0.0
    epoch: int = 0
    held: float = 0.0
    peak: float = 0.0

    def work_until(self, now: float) -> None:
        """Subtract the work since ``changed`` from the remaining work."""
        total = sum(run.work for run in self.running.values())
        for run in self.running.values():
            share = run.work / total if total else 1.0
            run.remaining = max(0.0, run.remaining - share * (now - self.changed))
        self.changed = now


class _PassEnd(NamedTuple):
    """End of a pass, which is void if a pass begins or ends on its rank before: ``epoch`` then differs."""

    rank: _Rank
    track: int
    epoch: int


class _Simulation:
    """Simulation at time ``now``, and the coming events."""

    def __init__(self, schedule: Schedule, costs: ScheduleCosts, replicas: tuple[int, ...]) -> None:
        self.schedule = schedule
        self.costs = costs
        self.replicas = replicas
        self.stages = [
            [_Rank(stage, replica, _tracks(schedule, stage, replica, count)) for replica in range(count)]
            for stage, count in enumerate(replicas)
        ]
        self.now = 0.0
        # The counter orders events at the same time, first in, first out.
        self.events: list[tuple[float, int, _PassEnd | Message]] = []
        self.counted = 0
        self.arrived: set[Message] = set()
        self.links: dict[tuple[int, int, int], tuple[float, float]] = {}
        """From a replica of a stage to a part: end of the last pass whose result was sent there, and its delay."""
        self.spans: list[Span] = []

    def run(self) -> Timeline:
        for stage in range(len(self.stages)):
            self._begin(stage)
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            if isinstance(event, Message):
                self.arrived.add(event)
                self._begin(event.part % len(self.stages))
            elif event.epoch == event.rank.epoch:  # otherwise the end was moved, and another event stands for it
                self._end(event.rank, event.track)
        self._check_finished()
        work = sum(self.costs.action_time(span.action, self.schedule.chunks) for span in self.spans)
        peaks = [max(rank.peak for rank in ranks) for ranks in self.stages]
        return Timeline(self.schedule, self.spans, self.replicas, work, peaks)

    def _begin(self, stage: int) -> None:
        """Begin all passes that can begin on a stage."""
        again = True
        while again:  # a replica that waits for another one to reach its UPDATE can begin in a later round
            again = False
            for rank in self.stages[stage]:
                started = [index for index in range(len(rank.tracks)) if self._begin_track(rank, index)]
                if started:
                    self._schedule_next_end(rank)
                    again = True

    def _begin_track(self, rank: _Rank, index: int) -> bool:
        """Advance until a pass begins (True) or has to wait (False)."""
        track = rank.tracks[index]
        while (
            index not in rank.running
            and track.next_action is not None
            and self._is_ready(rank, track, track.next_action)
        ):
            action = track.next_action
            if action.kind in OCCUPYING:
                rank.work_until(self.now)
                work = self.costs.action_time(action, self.schedule.chunks)
                rank.running[index] = _PassRun(action, self.now, work, work)
                if action.kind is Kind.F:
                    rank.held += 1
                    rank.peak = max(rank.peak, rank.held * self.costs.activation[rank.stage] / self.schedule.chunks)
                return True
            message = self.schedule.message_of(action)
            if action.kind is Kind.SEND and message is not None:
                self._add_event(self._arrival(action, message), message)
            track.next += 1
        return False

    def _is_ready(self, rank: _Rank, track: _Track, action: Action) -> bool:
        if sum(other.ended for other in rank.tracks if other is not track) < track.required[track.next]:
            return False
        if action.kind is Kind.UPDATE:
            # The gradients of all replicas are summed first.
            heads = [other.tracks[-1].next_action for other in self.stages[rank.stage]]
            return all(h is not None and (h.kind, h.version) == (action.kind, action.version) for h in heads)
        awaited = self.schedule.received_input_of(action)
        return awaited is None or awaited in self.arrived

    def _arrival(self, send: Action, message: Message) -> float:
        """Return the time at which a message arrives whose pass ends now."""
        if not self.schedule.hidden_transfers:
            return self.now + self.costs.transfer_time(message)
        making, carrying = self.costs.streaming_times(send, message, self.schedule)
        link = send.stage, message.part, message.microbatch % self.replicas[send.stage]
        before, late = self.links.get(link, (-math.inf, 0.0))
        # The link carries a message from the start of its pass, or from the arrival of the message before (before +
        # late), whichever is later. A pass without a partner ends sooner. It must not shorten the time on the link,
        # which is that of a full slot.
        late = max(late + carrying - max(self.now - before, making), carrying - making, 0.0)
        self.links[link] = self.now, late
        return self.now + late

    def _end(self, rank: _Rank, index: int) -> None:
        rank.work_until(self.now)
        run = rank.running.pop(index)
        track = rank.tracks[index]
        track.next += 1
        track.ended += run.action.kind in COMPUTE
        if run.action.kind is (Kind.W if self.schedule.splits_backward else Kind.B):
            rank.held -= 1
        self.spans.append(Span(run.action, rank.replica, run.start, self.now))
        self._schedule_next_end(rank)
        self._begin(rank.stage)

    def _schedule_next_end(self, rank: _Rank) -> None:
        """Schedule the next end on a rank, from the current rates of its passes."""
        rank.epoch += 1
        total = sum(run.work for run in rank.running.values())
        for index, run in rank.running.items():
            lasts = run.remaining * (total / run.work) if run.work else 0.0
            self._add_event(self.now + lasts, _PassEnd(rank, index, rank.epoch))

    def _add_event(self, time: float, event: _PassEnd | Message) -> None:
        self.counted += 1
        heapq.heappush(self.events, (time, self.counted, event))

    def _check_finished(self) -> None:
        waiting = [
            track.next_action
            for ranks in self.stages
            for rank in ranks
            for track in rank.tracks
            if track.next_action is not None
        ]
        if waiting:
            raise ScheduleError(
                f"{self.schedule.name}: these actions never become ready: {'; '.join(map(str, waiting))}"
            )


def _tracks(schedule: Schedule, stage: int, replica: int, replicas: int) -> list[_Track]:
    """Return the actions of one replica, as one track or as a forward and a backward one."""
    own = schedule.replica_actions(stage, replica, replicas)
    if not schedule.concurrent:
        return [_Track(own, [0] * len(own))]
    tracks = [_Track([], []), _Track([], [])]
    passed = [0, 0]
    for action in own:
        backward = int(Kind.F not in (action.kind, action.payload))
        # A B runs concurrently with the F directly before it, unless that is its own F; an F waits for every earlier B.
        last = next((a.microbatch for a in reversed(tracks[0].actions) if a.kind is Kind.F), action.microbatch)
        concurrent = action.kind is Kind.B and last != action.microbatch
        tracks[backward].actions.append(action)
        tracks[backward].required.append(passed[1 - backward] - concurrent if action.kind in OCCUPYING else 0)
        passed[backward] += action.kind in COMPUTE
    return tracks
