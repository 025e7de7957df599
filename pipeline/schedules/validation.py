"""Checks that a schedule can run: every pass once and in order, no deadlock, valid weight versions."""

from __future__ import annotations

from collections import Counter

from .actions import COMPUTE, Action, Kind, Schedule, ScheduleError, Weights
from .replay import Replay


def validate(schedule: Schedule) -> None:
    """Check that a schedule can run.

    - Each stage does F, then B, then W of every micro-batch and chunk once.
    - The input of a pass is received before the pass, and its result is sent after it.
    - Receives match sends, in order, and all stages have the same number of updates.
    - There is no deadlock if a send and its receive end together.
    - Weight versions exist and are those that the policy allows.

    Parameters
    ----------
    schedule : Schedule
        Schedule to check, such as one that :func:`schedule` did not make.

    Raises
    ------
    ScheduleError
        If a check fails; the message names stage, operation and micro-batch.
    """
    if not schedule.stages:
        raise ScheduleError(f"{schedule.name}: there are no stages")
    for stage, actions in enumerate(schedule.stages):
        for action in actions:
            if action.stage != stage:
                raise ScheduleError(f"{schedule.name}: {action} is in the list of stage {stage}")
        _check_passes(schedule, stage, actions)
        _check_ends(schedule, actions)
        _check_inputs(schedule, actions)
        replicas = schedule.replicas[stage] if schedule.replicas else 1
        for replica in range(replicas):
            _check_versions(schedule, schedule.replica_actions(stage, replica, replicas))
    _check_updates(schedule)
    _check_pairs(schedule)
    _check_rendezvous(schedule)


def _check_passes(schedule: Schedule, stage: int, actions: list[Action]) -> None:
    """Check that F, then B, then W occur once each."""
    kinds = (Kind.F, Kind.B, Kind.W) if schedule.splits_backward else (Kind.F, Kind.B)
    done: Counter[tuple[Kind, int | None, int]] = Counter()
    for action in actions:
        if action.kind in COMPUTE:
            before = kinds[: kinds.index(action.kind)][-1:]  # the pass before it, of which F has none
            if before and not done[before[0], action.microbatch, action.chunk]:
                raise ScheduleError(f"{schedule.name}: {action} comes before its {before[0]}")
            done[action.kind, action.microbatch, action.chunk] += 1
    wanted = {(kind, m, c) for kind in kinds for m in range(schedule.microbatches) for c in range(schedule.chunks)}
    # Sorted, so that all ranks report the same one of several.
    for kind, microbatch, chunk in sorted(wanted ^ done.keys(), key=str):
        missing = (kind, microbatch, chunk) in wanted
        action = Action(kind, stage, microbatch, chunk)
        raise ScheduleError(f"{schedule.name}: {action} {'is missing' if missing else 'is of no micro-batch or chunk'}")
    for (kind, microbatch, chunk), count in done.items():
        if count > 1:
            raise ScheduleError(f"{schedule.name}: {Action(kind, stage, microbatch, chunk)} occurs {count} times")


def _check_ends(schedule: Schedule, actions: list[Action]) -> None:
    """Check that sends and receives name their message and the stage at the other end."""
    for action in actions:
        if action.kind in (Kind.SEND, Kind.RECEIVE):
            message = schedule.message_of(action)
            if message is None:
                raise ScheduleError(f"{schedule.name}: {action} has no message that is sent between stages")
            right = schedule.send_of(message) if action.kind is Kind.SEND else schedule.receive_of(message)
            if action != right:
                raise ScheduleError(f"{schedule.name}: {action} should be: {right}")


def _check_inputs(schedule: Schedule, actions: list[Action]) -> None:
    """Check that inputs are received before they are needed, and results sent after they are made."""
    received, produced = set(), set()
    for action in actions:
        message = schedule.message_of(action)
        awaited = schedule.received_input_of(action)
        if awaited is not None and awaited not in received:
            raise ScheduleError(f"{schedule.name}: {action} comes before its input is received")
        if action.kind is Kind.SEND and message not in produced:
            raise ScheduleError(f"{schedule.name}: {action} comes before {action.payload} has made it")
        if action.kind is Kind.RECEIVE:
            received.add(message)
        produced.add(schedule.output_of(action))


def _check_updates(schedule: Schedule) -> None:
    """Check that all stages update equally often. Replicas without a last mini-batch take part in its update."""
    counts = [
        sum(a.kind is Kind.UPDATE and (a.microbatch or 0) < schedule.microbatches for a in actions)
        for actions in schedule.stages
    ]
    for stage, count in enumerate(counts):
        if count != counts[0]:
            raise ScheduleError(f"{schedule.name}: stage {stage} has {count} updates, stage 0 has {counts[0]}")


def _check_pairs(schedule: Schedule) -> None:
    """Check that messages between two stages are received in the order in which they are sent."""
    # Receives match messages by their order alone: one in another position would take the wrong tensor.
    for here in range(len(schedule.stages)):
        for there in range(len(schedule.stages)):
            sent = _between(schedule.stages[here], Kind.SEND, there)
            received = _between(schedule.stages[there], Kind.RECEIVE, here)
            for send, receive in zip(sent, received, strict=False):
                if schedule.message_of(send) != schedule.message_of(receive):
                    raise ScheduleError(f"{schedule.name}: {receive} is matched with another message: {send}")
            for action in [*sent[len(received) :], *received[len(sent) :]]:
                raise ScheduleError(f"{schedule.name}: {action} has no counterpart")


def _between(actions: list[Action], kind: Kind, peer: int) -> list[Action]:
    return [action for action in actions if action.kind is kind and action.peer == peer]


def _check_rendezvous(schedule: Schedule) -> None:
    """Check that the lists run to their end if a send and its receive end together."""
    replay = Replay(dict(enumerate(schedule.stages)))

    def step(stage: int) -> bool:
        action = replay.next_action(stage)
        if action is None or action.kind is Kind.RECEIVE:
            return False
        if action.kind is Kind.SEND:
            assert action.peer is not None
            other = replay.next_action(action.peer)
            if (
                other is None
                or other.kind is not Kind.RECEIVE
                or schedule.message_of(other) != schedule.message_of(action)
            ):
                return False
            replay.at[action.peer] += 1  # receives advance with their send only
        replay.at[stage] += 1
        return True

    replay.run(step)
    if replay.remaining:
        waiting = "; ".join(map(str, replay.remaining))
        raise ScheduleError(f"{schedule.name}: deadlock under synchronous sends: {waiting} wait for each other")


def _check_versions(schedule: Schedule, actions: list[Action]) -> None:
    """Check that each pass uses weights that exist, and that a micro-batch's passes follow the policy."""
    newest = 0
    stashed: dict[int, int | None] = {}  # by version: the micro-batch after whose last gradient the copy is dropped
    predicted: Action | None = None  # it applies to the next pass alone
    forward: dict[tuple[int | None, int], int | None] = {}  # version of the F, by micro-batch and chunk
    for action in actions:
        if action.kind is Kind.UPDATE:
            newest += 1
            if action.version != newest:
                raise ScheduleError(f"{schedule.name}: {action} makes version {action.version}, not {newest}")
        elif action.kind is Kind.STASH:
            if action.version != newest:
                raise ScheduleError(
                    f"{schedule.name}: {action} keeps version {action.version}, but the newest is {newest}"
                )
            stashed[newest] = action.microbatch
        elif action.kind is Kind.PREDICT:
            predicted = action
        elif action.kind in COMPUTE:
            there = {newest, *stashed}
            if predicted is not None and predicted.microbatch == action.microbatch:
                there = {predicted.version or 0}
            if action.version not in there:
                versions = ", ".join(map(str, sorted(there)))
                raise ScheduleError(
                    f"{schedule.name}: {action} uses weights {action.version}, but the stage has {versions}"
                )
            _check_policy(schedule, action, newest, forward)
            predicted = None
            if action.kind is (Kind.W if schedule.splits_backward else Kind.B):
                stashed = {version: last for version, last in stashed.items() if last != action.microbatch}


def _check_policy(
    schedule: Schedule, action: Action, newest: int, forward: dict[tuple[int | None, int], int | None]
) -> None:
    """Check that a pass uses the version that the policy requires: the newest one, or that of its F."""
    wanted = newest
    if action.kind is Kind.F:
        forward[action.microbatch, action.chunk] = action.version
    elif schedule.weights not in (Weights.NEWEST, Weights.RECOMPUTE):
        wanted = forward[action.microbatch, action.chunk] or 0
    # With vertical sync F uses an older version, with predictions a later one.
    free = action.kind is Kind.F and schedule.weights in (Weights.STASH, Weights.PREDICT)
    if not free and action.version != wanted:
        raise ScheduleError(
            f"{schedule.name}: {action} uses weights {action.version}, but the policy {schedule.weights.value!r} "
            f"requires {wanted}"
        )
