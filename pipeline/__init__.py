"""Part of the ``distconv`` package; import it as ``distconv.pipeline``."""

if __name__ != "distconv.pipeline":
    raise ImportError(
        "import this package as distconv.pipeline: under the bare name 'pipeline' its classes would exist twice"
    )

from distconv.errors import PipelineError

from .actions import Action, Kind, Schedule, ScheduleError, Weights
from .families import FAMILIES, schedule
from .runtime import Pipeline
from .serial import SerialPipeline
from .simulation import simulate
from .splitting import split
from .stage_graphs import SplitError
from .timeline import Span, Timeline
from .validation import validate

__all__ = [
    "FAMILIES",
    "Action",
    "Kind",
    "Pipeline",
    "PipelineError",
    "Schedule",
    "ScheduleError",
    "SerialPipeline",
    "Span",
    "SplitError",
    "Timeline",
    "Weights",
    "schedule",
    "simulate",
    "split",
    "validate",
]
