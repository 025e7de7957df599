"""Adds updates and weight versions to the order of passes: one function for each weight policy."""

from __future__ import annotations

from collections.abc import Iterator

from .actions import COMPUTE, Action, Kind, Weights
from .orders import Orders, Step


def with_versions(orders: Orders, weights: Weights, vertical_sync: bool = False) -> list[list[Action]]:
    """The steps as actions with versions, and the updates, stashes and predictions between them.

    Asynchronous schedules update after each mini-batch's B, so that B of mini-batch m finds weights of version m.
    With ``vertical_sync`` a mini-batch uses on every stage the version with which the first stage began it (PipeDream).
    """
    if weights is Weights.SYNCHRONOUS:
        return [_one_update(stage, steps) for stage, steps in enumerate(orders)]
    entry = newest_at_forward(orders[0])
    chosen = []
    for stage, steps in enumerate(orders):
        forward = entry if vertical_sync else newest_at_forward(steps)
        if weights is Weights.PREDICT:
            # Where the gradient will be applied: after B here, while it travels on to stage 0, floor(stage / 2)
            # updates happen here (Chen et al. 2018, s).
            forward = {m: m + stage // 2 for m in forward}
        chosen.append(list(_many_updates(stage, steps, weights, forward)))
    return [_with_stashes(actions) for actions in chosen] if weights is Weights.STASH else chosen


def newest_at_forward(steps: list[Step]) -> dict[int, int]:
    """For each mini-batch the number of updates before its F, if each B is followed by one."""
    found: dict[int, int] = {}
    updates = 0
    for step in steps:
        updates += step.kind is Kind.B
        if step.kind is Kind.F and step.microbatch is not None:
            found[step.microbatch] = updates
    return found


def _one_update(stage: int, steps: list[Step]) -> list[Action]:
    passes = [Action(step.kind, stage, step.microbatch, step.chunk, version=0) for step in steps]
    return [*passes, Action(Kind.UPDATE, stage, version=1)]


def _many_updates(stage: int, steps: list[Step], weights: Weights, forward: dict[int, int]) -> Iterator[Action]:
    newest = 0
    for step in steps:
        if step.microbatch is None:
            yield Action(step.kind, stage)
            continue
        of_backward = newest if weights is Weights.NEWEST else forward[step.microbatch]
        version = forward[step.microbatch] if step.kind is Kind.F else of_backward
        if weights is Weights.PREDICT and version != newest:
            yield Action(Kind.PREDICT, stage, step.microbatch, version=version)
        yield Action(step.kind, stage, step.microbatch, version=version)
        if step.kind is Kind.B:
            newest += 1
            yield Action(Kind.UPDATE, stage, step.microbatch, version=newest)


def _with_stashes(actions: list[Action]) -> list[Action]:
    """Before an update replaces weights that a later pass needs, a stash keeps them until that pass is done."""
    last_use = {action.version: index for index, action in enumerate(actions) if action.kind in COMPUTE}
    found: list[Action] = []
    for index, action in enumerate(actions):
        if action.kind is Kind.UPDATE and action.version is not None:
            replaced = action.version - 1
            use = last_use.get(replaced, -1)
            if use > index:
                found.append(Action(Kind.STASH, action.stage, actions[use].microbatch, version=replaced))
        found.append(action)
    return found
