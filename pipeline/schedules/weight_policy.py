"""Insertion of updates and weight versions, one function for each kind of policy.

Replicas of a stage share version numbers: each updates after its own mini-batch, with the gradients of the mini-batches
that the other replicas have at that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .actions import COMPUTE, Action, Kind, Weights
from .generators import Orders, SchedulePass


def synchronous_actions(orders: Orders) -> list[list[Action]]:
    """Return the actions of a synchronous schedule: one version for all passes, and an update at the end.

    Parameters
    ----------
    orders : list of list of SchedulePass
        Passes of each stage.

    Returns
    -------
    list of list of Action
    """
    actions = []
    for stage, steps in enumerate(orders):
        passes = [Action(step.kind, stage, step.microbatch, step.chunk, version=0) for step in steps]
        actions.append([*passes, Action(Kind.UPDATE, stage, version=1)])
    return actions


def asynchronous_actions(
    orders: Orders, weights: Weights, replicas: Sequence[int], vertical_sync: bool = False
) -> list[list[Action]]:
    """Return the actions of an asynchronous schedule, with updates, stashes and predictions.

    An update follows each mini-batch's B, so that without replicas the B of mini-batch m finds weights of version m.

    Parameters
    ----------
    orders : list of list of SchedulePass
        Passes of each stage.
    weights : Weights
        Weight policy.
    replicas : sequence of int
        Replicas of each stage.
    vertical_sync : bool
        True if a mini-batch uses on every stage the version with which the first stage began it (PipeDream). All stages
        then have the same number of replicas. Otherwise each stage uses its newest version.

    Returns
    -------
    list of list of Action
    """
    entry = newest_at_forward(orders[0], replicas[0])
    chosen = []
    for stage, (steps, count) in enumerate(zip(orders, replicas, strict=True)):
        forward = entry if vertical_sync else newest_at_forward(steps, count)
        if weights is Weights.PREDICT:
            # Predict the weights of the time at which the gradient reaches stage 0: floor(stage / 2) updates happen
            # here between B and that time (Chen et al. 2018, s).
            forward = {m: m // count + stage // 2 for m in forward}
        actions = list(_with_updates(stage, steps, weights, forward, count))
        # Replicas without a mini-batch in the last round take part in its update, which changes their weights, too.
        for missing in range(len(forward), -(-len(forward) // count) * count):
            actions.append(Action(Kind.UPDATE, stage, missing, version=missing // count + 1))
        chosen.append(_with_stashes(actions, count) if weights is Weights.STASH else actions)
    return chosen


def newest_at_forward(steps: list[SchedulePass], replicas: int) -> dict[int, int]:
    """Return for each mini-batch the number of updates before its F, if each B of its replica is followed by one.

    Parameters
    ----------
    steps : list of SchedulePass
        Passes of one stage.
    replicas : int
        Replicas of the stage.

    Returns
    -------
    dict of int to int
    """
    versions: dict[int, int] = {}
    updates = [0] * replicas
    for step in steps:
        if step.microbatch is not None:
            updates[step.microbatch % replicas] += step.kind is Kind.B
            if step.kind is Kind.F:
                versions[step.microbatch] = updates[step.microbatch % replicas]
    return versions


def _with_updates(
    stage: int, steps: list[SchedulePass], weights: Weights, forward: dict[int, int], replicas: int
) -> Iterator[Action]:
    """Yield the passes of one stage with their versions, an update after each B, and a prediction before each pass.

    Predictions are left out where the predicted version is the newest one.
    """
    newest = [0] * replicas  # by replica, since each has its own list, in which its k-th B makes version k
    for step in steps:
        if step.microbatch is None:  # SWITCH
            yield Action(step.kind, stage)
            continue
        replica = step.microbatch % replicas
        now = newest[replica]
        of_backward = now if weights in (Weights.NEWEST, Weights.RECOMPUTE) else forward[step.microbatch]
        version = forward[step.microbatch] if step.kind is Kind.F else of_backward
        if weights is Weights.PREDICT and version != now:
            yield Action(Kind.PREDICT, stage, step.microbatch, version=version)
        yield Action(step.kind, stage, step.microbatch, version=version)
        if step.kind is Kind.B:
            newest[replica] += 1
            yield Action(Kind.UPDATE, stage, step.microbatch, version=newest[replica])


def _with_stashes(actions: list[Action], replicas: int) -> list[Action]:
    """Return the actions with a stash before each update that replaces weights that a later pass needs."""
    # By replica and version: the last pass that reads it. Each replica holds copies of its own.
    last_use: dict[tuple[int, int | None], int] = {}
    for index, action in enumerate(actions):
        if action.kind in COMPUTE and action.microbatch is not None:
            last_use[action.microbatch % replicas, action.version] = index
    extended: list[Action] = []
    for index, action in enumerate(actions):
        if action.kind is Kind.UPDATE and action.microbatch is not None and action.version is not None:
            replaced = action.version - 1
            use = last_use.get((action.microbatch % replicas, replaced), -1)
            if use > index:
                extended.append(Action(Kind.STASH, action.stage, actions[use].microbatch, version=replaced))
        extended.append(action)
    return extended
