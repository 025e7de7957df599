"""Costs as one number for all stages, or one for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .actions import ScheduleError

Cost = float | Sequence[float]


def per_stage(name: str, value: Cost, stages: int) -> tuple[float, ...]:
    """Return a cost as one number for each stage.

    Parameters
    ----------
    name : str
        Argument, for the error message.
    value : float or sequence of float
    stages : int
        Number of stages.

    Returns
    -------
    tuple of float

    Raises
    ------
    ScheduleError
        If there are not ``stages`` numbers, or one is negative or not finite.

    Examples
    --------
    >>> per_stage("forward", 2, 3)
    (2.0, 2.0, 2.0)
    """
    try:
        values = tuple(map(float, value)) if isinstance(value, Iterable) else (float(value),) * stages
    except (TypeError, ValueError):
        raise ScheduleError(f"{name}={value!r} is neither a number nor one number per stage") from None
    if len(values) != stages:
        raise ScheduleError(f"{name}: {len(values)} costs for {stages} stages; give one number or {stages}")
    for stage, cost in enumerate(values):
        if not math.isfinite(cost) or cost < 0:
            raise ScheduleError(f"{name} of stage {stage} is {cost}; costs are finite and not below zero")
    return values
