"""One pass or update of a schedule: its time and place, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass

from distconv.pipeline.schedules.actions import Action


@dataclass(frozen=True)
class Span:
    """One pass or update.

    Attributes
    ----------
    action : Action
    replica : int
        Replica of its stage.
    start, end : float
        Times, in the unit of the costs; measured ones in seconds.
    """

    action: Action
    replica: int
    start: float
    end: float
