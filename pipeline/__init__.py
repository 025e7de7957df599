"""Part of the ``distconv`` package; import it as ``distconv.pipeline``.

Pipeline parallelism: :func:`split` divides a model into stages, :func:`schedule` orders their passes, :class:`Pipeline`
trains over MPI ranks, and :func:`simulate` predicts the time of a schedule. Users and the command line call them.

A *stage* runs on one rank, or on one process grid of ranks. *Replicas* of a stage hold the same weights and take
micro-batches round-robin. A *part* is a module between two split points; a stage has one part, or several *chunks* with
an interleaved schedule. A *pass* is the forward (F) or backward (B) computation of one micro-batch on one chunk. W is
the part of a backward pass that computes gradients of weights, if it is separate.

A *synchronous* schedule has one update for all micro-batches of a mini-batch. An *asynchronous* one updates each stage
after every mini-batch, while others are in flight; it does not divide mini-batches, so its micro-batches are
mini-batches.

::

    reference   Pipelined training without ranks, whose results the runtime reproduces bit for bit
    runtime     Pipelines over MPI ranks: placement of stages, execution of schedules, messages between stages
    schedules   Schedules as lists of actions: generators, messages, weight policies, checks
    simulation  Simulation of a schedule with given costs, timelines and Gantt charts
    splitting   Splitting of an unmodified model into stages
    stage       One rank's stage: passes, weight versions, statistics, random numbers
"""

if __name__ != "distconv.pipeline":
    raise ImportError(
        "import this package as distconv.pipeline: under the bare name 'pipeline' its classes would exist twice"
    )

from distconv.errors import PipelineError
from distconv.pipeline.reference.serial import SerialPipeline
from distconv.pipeline.runtime.pipeline import Pipeline
from distconv.pipeline.runtime.pipeline_plan import PipelinePlan
from distconv.pipeline.schedules.actions import Action, Kind, Schedule, ScheduleError, Weights
from distconv.pipeline.schedules.registry import FAMILIES, schedule
from distconv.pipeline.schedules.validation import validate
from distconv.pipeline.simulation.events import simulate
from distconv.pipeline.simulation.span import Span
from distconv.pipeline.simulation.timeline import Timeline
from distconv.pipeline.splitting.graph_cuts import SplitError
from distconv.pipeline.splitting.split import possible_cuts, split

__all__ = [
    "FAMILIES",
    "Action",
    "Kind",
    "Pipeline",
    "PipelineError",
    "PipelinePlan",
    "Schedule",
    "ScheduleError",
    "SerialPipeline",
    "Span",
    "SplitError",
    "Timeline",
    "Weights",
    "possible_cuts",
    "schedule",
    "simulate",
    "split",
    "validate",
]
