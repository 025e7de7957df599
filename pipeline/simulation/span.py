"""One pass or update of a schedule: when it ran, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass

from distconv.pipeline.schedules.actions import Action


@dataclass(frozen=True)
class Span:
    """One pass or update: when it ran, on which replica of its stage."""

    action: Action
    replica: int
    start: float
    end: float
