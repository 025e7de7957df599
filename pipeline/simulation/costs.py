"""Costs of the actions of a schedule, as numbers for each stage that are checked once."""

from __future__ import annotations

from dataclasses import dataclass

from distconv.pipeline.schedules.actions import Action, Kind, Message, Schedule
from distconv.pipeline.schedules.per_stage import Cost, per_stage


@dataclass(frozen=True)
class ScheduleCosts:
    """Seconds of each stage, for one micro-batch and all chunks of the stage together.

    ``backward`` is B alone: without W if the schedule has W, otherwise the full backward pass. ``transfer`` is the time
    of the boundary after a stage, and ``activation`` is in any unit of memory.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    update: tuple[float, ...]
    activation: tuple[float, ...]

    @classmethod
    def from_arguments(
        cls,
        schedule: Schedule,
        forward: Cost,
        backward: Cost,
        *,
        weight: Cost | None,
        transfer: Cost,
        update: Cost,
        activation: Cost,
    ) -> ScheduleCosts:
        """Return the costs of a schedule, from the arguments of a simulation.

        Parameters
        ----------
        schedule : Schedule
            The schedule.
        forward, backward, weight, transfer, update, activation
            As in :func:`distconv.pipeline.simulate`.

        Returns
        -------
        ScheduleCosts

        Raises
        ------
        ScheduleError
            If a cost is negative or not finite, or there is not one per stage.
        """
        count = len(schedule.stages)
        back = per_stage("backward", backward, count)
        if weight is None:
            # ``backward`` is the full backward pass; a separate W takes half of it.
            weights = tuple(cost / 2 if schedule.splits_backward else 0.0 for cost in back)
            back = tuple(cost - part for cost, part in zip(back, weights, strict=True))
        else:
            weights = per_stage("weight", weight, count)
            if not schedule.splits_backward:
                back = tuple(cost + part for cost, part in zip(back, weights, strict=True))
        return cls(
            per_stage("forward", forward, count),
            back,
            weights,
            per_stage("transfer", transfer, count),
            per_stage("update", update, count),
            per_stage("activation", activation, count),
        )

    def action_time(self, action: Action, chunks: int) -> float:
        """Return how long an action occupies its stage; 0 for all but passes and updates.

        Parameters
        ----------
        action : Action
            The action.
        chunks : int
            Number of chunks of each stage.

        Returns
        -------
        float
            Seconds.
        """
        per_pass = {Kind.F: self.forward, Kind.B: self.backward, Kind.W: self.weight}
        if action.kind in per_pass:
            return per_pass[action.kind][action.stage] / chunks
        return self.update[action.stage] if action.kind is Kind.UPDATE else 0.0

    def transfer_time(self, message: Message) -> float:
        """Return the transfer time of a message. An activation and its gradient cross the same boundary."""
        # The boundary has the number of the part before it, which sends activations and receives gradients.
        upper = message.part - 1 if message.payload is Kind.F else message.part
        return self.transfer[upper % len(self.transfer)]

    def streaming_times(self, send: Action, message: Message, schedule: Schedule) -> tuple[float, float]:
        """Return the time of the pass that makes a result, and the time in which the link carries this result.

        Both begin together, because the result is passed on while it is computed.

        A pass makes its message from its beginning to its end. In a concurrent schedule F and B share the stage, and
        each has half of the link: in F + B a message crosses it in each direction. A transfer is therefore hidden if it
        takes at most F (1F1B-AS) or at most (F + B) / 2 (FBP-AS), as BaPipe's Table I requires of the bandwidth.

        Parameters
        ----------
        send : Action
            The send on the stage that makes the message.
        message : Message
            The message.
        schedule : Schedule
            A schedule with ``hidden_transfers``.

        Returns
        -------
        tuple of float
            Seconds of the pass, and of the link.
        """
        carrying = self.transfer_time(message)
        if schedule.concurrent:
            return self.forward[send.stage] + self.backward[send.stage], 2 * carrying
        # The pass that makes the message, of which only kind, stage and chunk count.
        making = Action(message.payload, send.stage, message.microbatch, send.chunk)
        return self.action_time(making, schedule.chunks), carrying
