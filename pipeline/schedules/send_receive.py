"""Adds sends and receives to the lists of passes, such that synchronous sends never deadlock.

The lists are run as if a send ended only when its receiver takes it. A send stands right behind the pass that made its
message, a receive right before the pass that needs it. Where all stages would wait for each other, as neighbours do
that send to each other at once, one that is sending takes what is sent to it first: its receive moves before its send.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .actions import Action, Message, Schedule, ScheduleError


@dataclass
class _Stage:
    """How far one stage has come."""

    todo: list[Action]
    next: int = 0
    placed: list[Action] = field(default_factory=list)
    sending: Message | None = None
    arrived: set[Message] = field(default_factory=set)


def with_transfers(schedule: Schedule) -> Schedule:
    """The same schedule with its messages.

    Raises
    ------
    ScheduleError
        If the passes wait for each other in a circle.
    """
    stages = [_Stage(actions) for actions in schedule.stages]
    while any(stage.next < len(stage.todo) or stage.sending for stage in stages):
        if any([_advance(schedule, stages, stage) for stage in stages]):
            continue
        stuck = next((stage for stage in stages if stage.sending), None)
        if stuck is None:
            waiting = next(stage.todo[stage.next] for stage in stages if stage.next < len(stage.todo))
            raise ScheduleError(f"{schedule.name}: {waiting} waits for itself; its stages' orders form a circle")
        _deliver(schedule, stages, stuck)
    return replace(schedule, stages=[stage.placed for stage in stages])


def _advance(schedule: Schedule, stages: list[_Stage], stage: _Stage) -> bool:
    """Do one thing on a stage; False if it has to wait."""
    if stage.sending:
        awaited = _awaited(schedule, stages[stage.sending.part % len(stages)])
        if awaited is None or schedule.receives(awaited).peer != schedule.sends(stage.sending).stage:
            return False
        _deliver(schedule, stages, stage)
        return True
    if stage.next == len(stage.todo) or _awaited(schedule, stage):
        return False
    action = stage.todo[stage.next]
    stage.placed.append(action)
    stage.next += 1
    made = schedule.makes(action)
    if made is not None and len(stages) > 1:
        stage.sending = made
    return True


def _awaited(schedule: Schedule, stage: _Stage) -> Message | None:
    """The message without which a stage cannot go on; None if it can, or is sending."""
    if stage.sending or stage.next == len(stage.todo):
        return None
    needed = schedule.awaits(stage.todo[stage.next])
    return None if needed in stage.arrived else needed


def _deliver(schedule: Schedule, stages: list[_Stage], sender: _Stage) -> None:
    message = sender.sending
    assert message is not None
    receiver = stages[message.part % len(stages)]
    sender.placed.append(schedule.sends(message))
    sender.sending = None
    receiver.placed.append(schedule.receives(message))
    receiver.arrived.add(message)
