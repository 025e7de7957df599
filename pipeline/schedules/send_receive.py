"""Insertion of sends and receives, such that synchronous sends never deadlock.

The lists are replayed as if a send ended only when its receiver takes the message. A send follows the pass that made
its message, and a receive precedes the pass that needs it. If all stages would wait for each other, as neighbours do
that send to each other at the same time, a sending stage first takes the message that is sent to it: its receive moves
before its send.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .actions import Action, Message, Schedule, ScheduleError
from .replay import Replay


@dataclass
class _Stage:
    """Actions placed on one stage so far. While ``sending`` is set, the stage is blocked in a synchronous send."""

    actions: list[Action] = field(default_factory=list)
    sending: Message | None = None
    received: set[Message] = field(default_factory=set)


def with_transfers(schedule: Schedule) -> Schedule:
    """Return a schedule with sends and receives added to its passes.

    Parameters
    ----------
    schedule : Schedule
        Passes and updates.

    Returns
    -------
    Schedule

    Raises
    ------
    ScheduleError
        If passes wait for each other in a cycle.
    """
    placing = _MessagePlacement(schedule)
    # Each rank makes all lists by itself. The order of stages is therefore fixed, also where all of them are stuck.
    while True:
        placing.run(placing.advance)
        stuck = next((stage for stage in placing.stages if stage.sending), None)
        if stuck is None:
            break
        placing.deliver(stuck)
    if placing.remaining:
        raise ScheduleError(
            f"{schedule.name}: {placing.remaining[0]} waits for itself, since the orders of its stages form a cycle"
        )
    return replace(schedule, stages=[stage.actions for stage in placing.stages])


class _MessagePlacement(Replay[int]):
    """Replay of the lists of passes."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(dict(enumerate(schedule.stages)))
        self.schedule = schedule
        self.stages = [_Stage() for _ in schedule.stages]

    def advance(self, index: int) -> bool:
        """Do one action of a stage. Return False if it has to wait."""
        stage = self.stages[index]
        if stage.sending:
            # The message is delivered only to a receiver that waits for a message of this stage.
            awaited = self._awaited_message(stage.sending.part % len(self.stages))
            if awaited is None or self.schedule.receive_of(awaited).peer != index:
                return False
            self.deliver(stage)
            return True
        action = self.next_action(index)
        if action is None or self._awaited_message(index):
            return False
        stage.actions.append(action)
        self.at[index] += 1
        if len(self.stages) > 1:  # the chunks of a single stage exchange results without messages
            stage.sending = self.schedule.output_of(action)
        return True

    def _awaited_message(self, index: int) -> Message | None:
        """Return the message for which a stage waits; None if it can continue, or is sending."""
        stage, action = self.stages[index], self.next_action(index)
        if stage.sending or action is None:
            return None
        needed = self.schedule.received_input_of(action)
        return None if needed in stage.received else needed

    def deliver(self, sender: _Stage) -> None:
        """Place the send of a stage and the receive of the same message."""
        message = sender.sending
        assert message is not None
        receiver = self.stages[message.part % len(self.stages)]
        sender.actions.append(self.schedule.send_of(message))
        sender.sending = None
        # If the receiver is itself blocked in a send, that is placed later: its receive moves before its send.
        receiver.actions.append(self.schedule.receive_of(message))
        receiver.received.add(message)
