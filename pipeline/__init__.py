"""Part of the ``distconv`` package; import it as ``distconv.pipeline``."""

if __name__ != "distconv.pipeline":
    raise ImportError(
        "import this package as distconv.pipeline: under the bare name 'pipeline' its classes would exist twice"
    )

from .actions import Action, Kind, Schedule, ScheduleError, Weights
from .families import FAMILIES, schedule
from .simulation import simulate
from .timeline import Span, Timeline
from .validation import validate

__all__ = [
    "FAMILIES",
    "Action",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "Weights",
    "schedule",
    "simulate",
    "validate",
]
