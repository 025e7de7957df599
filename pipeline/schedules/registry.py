"""Schedules by name.

:func:`schedule` combines a generator, a weight policy and the messages into a :class:`Schedule`.

The endings of BaPipe's names describe the execution of transfers: AS (asynchronous) transfers a result while it is
computed, SNO (synchronous, no overlap) after the pass, SO (synchronous, overlap) after the pass and overlapped with
passes of other micro-batches. FBP runs a forward and a backward pass in parallel. This is unrelated to
:attr:`.Schedule.asynchronous`: all four names update once per mini-batch.

Source: Zhao et al. 2020 (BaPipe), 3.2 for "1f1b-as", "fbp-as", "1f1b-sno" and "1f1b-so"; the others are cited in
:mod:`.generators`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import generators
from .actions import Schedule, ScheduleError, Weights
from .send_receive import with_transfers
from .weight_policy import asynchronous_actions, synchronous_actions


@dataclass(frozen=True)
class ScheduleFamily:
    """Properties of the schedules of one name.

    Attributes
    ----------
    summary : str
        One line for ``--help``.
    order : callable
        Generator of the order of passes, called with the number of stages, of micro-batches, and the options.
    weights : Weights
        Default policy.
    options : tuple of str
        Options of :func:`schedule` that apply.
    hidden_transfers, concurrent : bool
        As in :class:`Schedule`.
    """

    summary: str
    order: Callable[..., generators.Orders]
    weights: Weights = Weights.SYNCHRONOUS
    options: tuple[str, ...] = ()
    hidden_transfers: bool = False
    concurrent: bool = False


FAMILIES = {
    "gpipe": ScheduleFamily("all forwards, then all backwards", generators.gpipe),
    "1f1b-sno": ScheduleFamily("1F1B: forwards and backwards alternate", generators.one_f_one_b),
    "1f1b-so": ScheduleFamily("1F1B with doubled warm-up, which hides transfers", generators.doubled_warm_up),
    "1f1b-as": ScheduleFamily(
        "1F1B that passes results on while computing", generators.one_f_one_b, hidden_transfers=True
    ),
    "fbp-as": ScheduleFamily(
        "1F1B that runs a forward and a backward at the same time",
        generators.doubled_warm_up,
        hidden_transfers=True,
        concurrent=True,
    ),
    "pipedream": ScheduleFamily(
        "an update after each mini-batch, weights stashed",
        generators.pipedream,
        Weights.STASH,
        ("vertical_sync", "replicas"),
    ),
    "spectrain": ScheduleFamily(
        "an update after each mini-batch, weights predicted", generators.one_f_one_b, Weights.PREDICT
    ),
    "stale": ScheduleFamily(
        "an update in each cycle, newest weights", generators.stale, Weights.NEWEST, ("switch_after",)
    ),
    "interleaved": ScheduleFamily("1F1B over several chunks a stage", generators.interleaved, options=("chunks",)),
    "zero-bubble": ScheduleFamily("1F1B that computes dL/dw later, where ranks would be idle", generators.zero_bubble),
}
"""Known schedules by name."""


def schedule(name: str, stages: int, microbatches: int, **options: Any) -> Schedule:
    """Return a schedule by its name.

    Parameters
    ----------
    name : str
        Key of ``FAMILIES``.
    stages : int
        Number of stages.
    microbatches : int
        Number of micro-batches, for asynchronous schedules of mini-batches.
    **options
        ``chunks``: parts on each stage (interleaved; default 2). ``vertical_sync``: True to use the weights of the
        first stage on all stages (pipedream; default False). ``replicas`` of each stage (pipedream; default 1).
        ``switch_after``: number of mini-batches after which the rest runs without pipelining (stale; default: all).
        ``weights``: a policy of ``Weights``. Asynchronous schedules accept any but synchronous (default: the family's);
        synchronous ones accept recompute (default: none).

    Returns
    -------
    Schedule
        With messages, updates and weight versions.

    Raises
    ------
    ScheduleError
        If the name is unknown, a count is below one, or an option does not apply.

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
    # Without defaults, which may depend on the number of micro-batches (switch_after): pipelines make the schedule
    # again for other numbers.
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
        stages=asynchronous_actions(order, weights, replicas, vertical_sync)
        if asynchronous
        else synchronous_actions(order),
        microbatches=microbatches,
        weights=weights,
        chunks=given.get("chunks", 1),
        hidden_transfers=family.hidden_transfers,
        concurrent=family.concurrent,
        replicas=replicas,
        options=asked,
    )
    return with_transfers(passes)


def _weights(name: str, family: ScheduleFamily, value: Any) -> Weights:
    """Return the weight policy that ``value`` names, if the family supports it."""
    synchronous = family.weights is Weights.SYNCHRONOUS
    possible = (Weights.RECOMPUTE,) if synchronous else tuple(w for w in Weights if w is not Weights.SYNCHRONOUS)
    if value is None or value == family.weights:
        return family.weights
    if value not in possible:
        raise ScheduleError(f"{name}: weights={value!r} must be one of {', '.join(w.value for w in possible)}")
    return Weights(value)


def _check_vertical_sync(name: str, vertical_sync: bool, weights: Weights, replicas: tuple[int, ...]) -> None:
    if vertical_sync and weights is not Weights.STASH:
        raise ScheduleError(
            f"{name}: vertical_sync requires weights='stash', which keeps old versions (found {weights.value!r})"
        )
    if vertical_sync and len(set(replicas)) > 1:
        raise ScheduleError(f"{name}: vertical_sync requires equal replicas on all stages (found {list(replicas)})")


def check_count(name: str, what: str, value: Any, least: int = 1, most: float = math.inf) -> int:
    """Return a value as an int, checked to be in range.

    Parameters
    ----------
    name, what : str
        Schedule and argument, for the error message.
    value : object
        Any integer type but bool.
    least, most : number
        Limits, both included.

    Returns
    -------
    int

    Raises
    ------
    ScheduleError
        If it is not an integer in the range.
    """
    # NumPy's integers are accepted, True is not.
    if hasattr(value, "__index__") and not isinstance(value, bool) and least <= value <= most:
        return int(value)
    limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    raise ScheduleError(f"{name}: {what}={value!r} is not a whole number {limits}")


def _parse_chunks(name: str, value: Any, stages: int, microbatches: int) -> int:
    return check_count(name, "chunks", 2 if value is None else value)


def _parse_vertical_sync(name: str, value: Any, stages: int, microbatches: int) -> bool:
    if value not in (None, True, False):
        raise ScheduleError(f"{name}: vertical_sync={value!r} is neither True nor False")
    return bool(value)


def _parse_replicas(name: str, value: Any, stages: int, microbatches: int) -> tuple[int, ...]:
    return per_stage_replicas(name, 1 if value is None else value, stages)


def _parse_switch_after(name: str, value: Any, stages: int, microbatches: int) -> int:
    return check_count(name, "switch_after", microbatches if value is None else value, 0, microbatches)


CHECKS: dict[str, Callable[[str, Any, int, int], Any]] = {
    "chunks": _parse_chunks,
    "vertical_sync": _parse_vertical_sync,
    "replicas": _parse_replicas,
    "switch_after": _parse_switch_after,
}
"""Functions that check an option and fill in its default, called with name, value, stages and micro-batches."""


def remake(given: Schedule, **options: Any) -> Schedule:
    """Return a schedule again with other options.

    Parameters
    ----------
    given : Schedule
        Schedule that :func:`schedule` has made.
    **options
        Options to replace.

    Returns
    -------
    Schedule

    Raises
    ------
    ScheduleError
        If ``given`` was not made by :func:`schedule`, or an option does not apply.
    """
    # A schedule that was edited keeps its name. Making it again would drop the changes.
    sizes = len(given.stages), given.microbatches
    if given.name not in FAMILIES or schedule(given.name, *sizes, **given.options) != given:
        asked = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ScheduleError(f"{given.name}: options cannot be applied to a Schedule object; make it with {asked}")
    return schedule(given.name, *sizes, **given.options | options)


def per_stage_replicas(name: str, value: Any, stages: int) -> tuple[int, ...]:
    """Return replicas as one count for each stage.

    Parameters
    ----------
    name : str
        Schedule, for the error message.
    value : int or sequence of int
    stages : int
        Number of stages.

    Returns
    -------
    tuple of int

    Raises
    ------
    ScheduleError
        If there are not ``stages`` counts, or one is below 1.
    """
    counts = tuple(value) if isinstance(value, Iterable) else (value,) * stages
    if len(counts) != stages:
        raise ScheduleError(
            f"{name}: {len(counts)} counts of replicas for {stages} stages; give one number or {stages}"
        )
    return tuple(check_count(name, f"replicas of stage {stage}", count) for stage, count in enumerate(counts))
