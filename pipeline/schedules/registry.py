"""The schedules by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import generators
from .actions import Schedule, ScheduleError, Weights
from .send_receive import with_transfers
from .weight_policy import many_updates, one_update


@dataclass(frozen=True)
class Family:
    """What sets the schedules of one name apart. ``summary``: in a line, for help."""

    summary: str
    order: Callable[..., generators.Orders]
    weights: Weights = Weights.SYNCHRONOUS
    options: tuple[str, ...] = ()
    hidden_transfers: bool = False
    concurrent: bool = False


FAMILIES = {
    "gpipe": Family("all forwards, then all backwards", generators.gpipe),
    "1f1b-sno": Family("forwards and backwards in turn", generators.one_f_one_b),
    "1f1b-so": Family("1F1B with doubled warm-up, which hides transfers", generators.doubled_warm_up),
    "1f1b-as": Family("1F1B that passes results on while computing", generators.one_f_one_b, hidden_transfers=True),
    "fbp-as": Family(
        "forward and backward at the same time", generators.doubled_warm_up, hidden_transfers=True, concurrent=True
    ),
    "pipedream": Family(
        "an update after each mini-batch, weights stashed",
        generators.pipedream,
        Weights.STASH,
        ("vertical_sync", "replicas"),
    ),
    "spectrain": Family("an update after each mini-batch, weights predicted", generators.one_f_one_b, Weights.PREDICT),
    "stale": Family("an update in each cycle, newest weights", generators.stale, Weights.NEWEST, ("switch_after",)),
    "interleaved": Family("1F1B over several chunks a stage", generators.interleaved, options=("chunks",)),
    "zero-bubble": Family("dL/dw apart, where 1F1B would wait", generators.zero_bubble),
}


def schedule(name: str, stages: int, microbatches: int, **options: Any) -> Schedule:
    """The schedule ``name`` of ``microbatches`` micro-batches (asynchronous ones: mini-batches) over ``stages`` stages.

    Options: ``chunks`` of each stage (interleaved; default 2); ``vertical_sync`` (pipedream; default False);
    ``replicas`` of each stage (pipedream; default 1 each); ``switch_after`` that many mini-batches go on without
    pipelining (stale; default: never); ``weights`` of the passes, one of ``Weights`` (asynchronous ones: any but
    synchronous, default the family's own; synchronous ones: recompute, default none).

    Raises
    ------
    ScheduleError
        For an unknown name, counts below one, or an option that the schedule does not have.

    Examples
    --------
    >>> schedule("1f1b-sno", 2, 3).stages[1][0]
    Action(kind=<Kind.RECEIVE: 'receive'>, stage=1, microbatch=0, chunk=0, peer=0, version=None, payload=<Kind.F: 'F'>)
    """
    if name not in FAMILIES:
        raise ScheduleError(f"there is no schedule {name!r}; there are {', '.join(FAMILIES)}")
    stages = check_count(name, "stages", stages)
    microbatches = check_count(name, "microbatches", microbatches)
    family = FAMILIES[name]
    asked = {key: value for key, value in options.items() if value is not None}
    weights = _weights(name, family, options.pop("weights", None))
    unknown = sorted(set(options) - set(family.options))
    if unknown:
        accepted = ", ".join((*family.options, "weights"))
        raise ScheduleError(f"{name}: option {unknown[0]!r} does not apply; its options: {accepted}")
    given = {option: CHECKS[option](name, options.get(option), stages, microbatches) for option in family.options}
    vertical_sync = given.pop("vertical_sync", False)
    replicas = given.get("replicas", (1,) * stages)
    _check_vertical_sync(name, vertical_sync, weights, replicas)
    order = family.order(stages, microbatches, **given)
    asynchronous = family.weights is not Weights.SYNCHRONOUS
    passes = Schedule(
        name=name,
        stages=many_updates(order, weights, replicas, vertical_sync) if asynchronous else one_update(order),
        microbatches=microbatches,
        weights=weights,
        chunks=given.get("chunks", 1),
        hidden_transfers=family.hidden_transfers,
        concurrent=family.concurrent,
        replicas=replicas,
        options=asked,
    )
    return with_transfers(passes)


def _weights(name: str, family: Family, value: Any) -> Weights:
    """The weight policy that ``value`` names, if the family can have it."""
    synchronous = family.weights is Weights.SYNCHRONOUS
    possible = (Weights.RECOMPUTE,) if synchronous else tuple(w for w in Weights if w is not Weights.SYNCHRONOUS)
    if value is None or value == family.weights:
        return family.weights
    if value not in tuple(possible):
        raise ScheduleError(f"{name}: weights={value!r} must be one of {', '.join(w.value for w in possible)}")
    return Weights(value)


def _check_vertical_sync(name: str, vertical_sync: bool, weights: Weights, replicas: tuple[int, ...]) -> None:
    if vertical_sync and weights is not Weights.STASH:
        raise ScheduleError(f"{name}: vertical_sync needs old versions: weights='stash', not {weights.value!r}")
    if vertical_sync and len(set(replicas)) > 1:
        raise ScheduleError(f"{name}: vertical_sync needs equal replicas on all stages, not {list(replicas)}")


def check_count(name: str, what: str, value: Any, least: int = 1, most: float = math.inf) -> int:
    """``value`` if it is a whole number in range.

    Raises
    ------
    ScheduleError
        If it is not.
    """
    # NumPy's whole numbers are welcome, True is not.
    if hasattr(value, "__index__") and not isinstance(value, bool) and least <= value <= most:
        return int(value)
    limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    raise ScheduleError(f"{name}: {what}={value!r} is not a whole number {limits}")


def _chunks(name: str, value: Any, stages: int, microbatches: int) -> int:
    return check_count(name, "chunks", 2 if value is None else value)


def _vertical_sync(name: str, value: Any, stages: int, microbatches: int) -> bool:
    if value not in (None, True, False):
        raise ScheduleError(f"{name}: vertical_sync={value!r} is neither True nor False")
    return bool(value)


def _replicas(name: str, value: Any, stages: int, microbatches: int) -> tuple[int, ...]:
    return per_stage_replicas(name, 1 if value is None else value, stages)


def _switch_after(name: str, value: Any, stages: int, microbatches: int) -> int:
    return check_count(name, "switch_after", microbatches if value is None else value, 0, microbatches)


CHECKS: dict[str, Callable[[str, Any, int, int], Any]] = {
    "chunks": _chunks,
    "vertical_sync": _vertical_sync,
    "replicas": _replicas,
    "switch_after": _switch_after,
}


def remade(given: Schedule, **options: Any) -> Schedule:
    """``given``, which :func:`schedule` made, with other ``options``.

    Raises
    ------
    ScheduleError
        If it is of another origin, or does not have the options.
    """
    sizes = len(given.stages), given.microbatches
    if given.name not in FAMILIES or schedule(given.name, *sizes, **given.options) != given:
        asked = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ScheduleError(f"{given.name}: a schedule of one's own is as it is; make it for {asked}")
    return schedule(given.name, *sizes, **given.options | options)


def per_stage_replicas(name: str, value: Any, stages: int) -> tuple[int, ...]:
    """Replicas as one count for each stage.

    Raises
    ------
    ScheduleError
        If there are not ``stages`` of them, or one is below 1.
    """
    counts = tuple(value) if isinstance(value, Iterable) else (value,) * stages
    if len(counts) != stages:
        raise ScheduleError(
            f"{name}: {len(counts)} counts of replicas for {stages} stages; give one number or {stages}"
        )
    return tuple(check_count(name, f"replicas of stage {stage}", count) for stage, count in enumerate(counts))
