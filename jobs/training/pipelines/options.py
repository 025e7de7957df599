"""Command-line options of pipelines, and their conversion to a :class:`Pipelining` for a number of ranks.

Called by the training commands that support pipelines.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from distconv.errors import PlanError
from distconv.jobs.training.options import positive_int, select_device
from distconv.pipeline import FAMILIES, PipelinePlan, ScheduleError, schedule
from distconv.pipeline.reference.serial import WEIGHTS
from distconv.pipeline.runtime.device_kinds import Kinds, kind_of_rank, parse_kinds
from distconv.pipeline.runtime.pipeline import BATCH_NORM
from distconv.pipeline.runtime.placement import StagePlacement, StagePlan
from distconv.pipeline.schedules.registry import per_stage_replicas

REFINEMENTS = (
    "stages",
    "ppv",
    "microbatches",
    "replicas",
    "weights",
    "vertical_sync",
    "running_statistics",
    "switch_after",
)
"""Options that require ``--pipeline``."""


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """Configuration of a pipeline: schedule, stages and split points.

    Without ``ppv`` and ``cuts`` the model is split into parts of about equal time.

    Parameters
    ----------
    schedule : str
        Name of the schedule.
    replicas : tuple of int
        Replicas of each stage. A replica is one rank unless ``plans`` distribute it.
    chunks : int
        Parts of the model per stage.
    ppv : tuple of int, optional
        Numbers of the layers after which the model is split, counted from 1 (stale weights, 4.1).
    microbatches : int
        Micro-batches of a mini-batch.
    weights : str, optional
        Weights used by backward passes. None: the schedule's default.
    vertical_sync : bool
        True uses the same version of the weights for a micro-batch in all stages.
    batch_norm : str
        Update of the running statistics: after each micro-batch (``micro``) or each mini-batch (``deferred``).
    switch_after : int, optional
        Step, counted from 0, from which mini-batches are no longer pipelined. None: never.
    cuts : tuple of str, optional
        Names of the layers before which the model is split.
    plans : tuple of StagePlan, optional
        Plan of each stage.
    kinds : tuple of str
        Device type of each rank that the plan requires.
    kind : str, optional
        Device type of this rank.
    """

    schedule: str
    replicas: tuple[int, ...]
    chunks: int
    ppv: tuple[int, ...] | None
    microbatches: int
    weights: str | None
    vertical_sync: bool
    batch_norm: str
    switch_after: int | None
    cuts: tuple[str, ...] | None = None
    plans: tuple[StagePlan, ...] | None = None
    kinds: tuple[str, ...] = ()
    kind: str | None = None

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.replicas)

    @property
    def part_replicas(self) -> list[int]:
        """Replicas of each part of the model."""
        return list(self.replicas) * self.chunks

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the pipeline that only some schedules accept."""
        return {"vertical_sync": True} if self.vertical_sync else {}


def add_pipeline_arguments(parser: argparse.ArgumentParser, container: argparse._MutuallyExclusiveGroup) -> None:
    """Add ``--pipeline``, ``--pipeline-plan`` and their refinements.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    container : argparse._MutuallyExclusiveGroup
        Group of ``--grid`` and ``--plan``.
    """
    runnable = ", ".join(name for name, family in FAMILIES.items() if not family.concurrent)
    container.add_argument(
        "--pipeline",
        metavar="SCHEDULE",
        help=f"train as a pipeline with this schedule: {runnable} (docs/how-to/pipelines.md)",
    )
    container.add_argument(
        "--pipeline-plan",
        metavar="PLAN.json",
        help="train as a pipeline that distconv explore has chosen and written to this file",
    )
    add_devices_argument(parser, "device type of each rank, for a plan with several")
    group = parser.add_argument_group("pipeline", "options of --pipeline")
    group.add_argument(
        "--stages",
        type=positive_int,
        metavar="N",
        help="number of stages, of about equal time (default: as many as the ranks allow)",
    )
    group.add_argument(
        "--ppv",
        type=counts,
        metavar="3,5,7",
        help="split points: split the model after these convolution and linear layers, counted from 1",
    )
    group.add_argument(
        "--microbatches",
        type=positive_int,
        metavar="M",
        help="micro-batches per mini-batch (default: as many as stages; 1 for asynchronous schedules)",
    )
    group.add_argument(
        "--replicas",
        type=counts,
        metavar="2,1",
        help="ranks of each stage: one number for all stages, or one per stage (default: 1)",
    )
    group.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="weight version that backward passes use (default: the schedule's own)",
    )
    group.add_argument(
        "--vertical-sync",
        action="store_true",
        default=None,  # not False, so that pipelining_of() recognizes options that were given
        help="use one weight version of a micro-batch in all stages; goes with --weights stash",
    )
    group.add_argument(
        "--running-statistics",
        choices=BATCH_NORM,
        help="update the running statistics of batch norm per micro-batch (micro) or per mini-batch (deferred) "
        "(default: micro)",
    )
    group.add_argument(
        "--switch-after",
        type=positive_int,
        metavar="STEP",
        help="train without overlap of mini-batches after STEP steps (hybrid training)",
    )


def add_devices_argument(container: argparse._ActionsContainer, what: str) -> None:
    """Add ``--devices``.

    Parameters
    ----------
    container : argparse.ArgumentParser
        Parser or group of options.
    what : str
        Beginning of its help.
    """
    container.add_argument(
        "--devices",
        type=device_kinds,
        metavar="OLD:2,NEW:2",
        help=f"{what}: NAME:RANKS,... in rank order, or gpu or host to name each rank's type after its GPU or host",
    )


def device_kinds(text: str) -> Kinds:
    """Parse the value of ``--devices``.

    Raises
    ------
    ArgumentTypeError
        If the string is not a valid value.
    """
    try:
        return parse_kinds(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def counts(text: str) -> tuple[int, ...]:
    """Parse integers above zero, separated by commas."""
    return tuple(positive_int(word) for word in text.split(","))


def pipelining_of(options: argparse.Namespace, ranks: int) -> Pipelining | None:
    """Return the pipeline of the options.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    ranks : int
        Number of ranks.

    Returns
    -------
    Pipelining or None
        None without ``--pipeline``.

    Raises
    ------
    ScheduleError
        If options contradict each other.
    GridError
        If the stages need another number of ranks.
    """
    if options.check_replicas_every and (options.pipeline or options.pipeline_plan):
        raise ScheduleError(
            "--check-replicas-every: cannot be combined with a pipeline, whose stages have different "
            "weights. Remove it."
        )
    if options.shard_optimizer and (options.pipeline or options.pipeline_plan):
        raise ScheduleError(
            "--shard-optimizer: cannot be combined with a pipeline, whose stages have different weights. Remove it."
        )
    if options.shard_weights and (options.pipeline or options.pipeline_plan):
        raise ScheduleError("--shard-weights: cannot be combined with a pipeline, which splits the weights. Remove it.")
    if options.batch_norm and (options.pipeline or options.pipeline_plan):
        raise ScheduleError(
            "--batch-norm: cannot be combined with a pipeline, whose stages normalize over the micro-batch. Remove it."
        )
    if options.devices is not None and options.pipeline_plan is None:
        raise ScheduleError("--devices: only an option of --pipeline-plan, with a file of distconv explore --devices")
    if options.pipeline is None:
        given = [name for name in REFINEMENTS if getattr(options, name) is not None]
        if given:
            raise ScheduleError(
                f"--{given[0].replace('_', '-')}: only an option of pipelines. Add --pipeline SCHEDULE."
            )
        return None
    order = schedule(options.pipeline, 1, 1)  # of any size: chunks and updates follow from the name
    stages = _stages(options, ranks, order.chunks)
    replicas = options.replicas or (1,)
    replicas = per_stage_replicas("--replicas", replicas * stages if len(replicas) == 1 else replicas, stages)
    if options.switch_after is not None and order.chunks > 1:
        raise ScheduleError(
            f"--switch-after: not supported by {options.pipeline}, which has {order.chunks} chunks on each "
            "rank. Remove it."
        )
    return Pipelining(
        schedule=options.pipeline,
        replicas=StagePlacement(ranks, replicas).replicas,
        chunks=order.chunks,
        ppv=options.ppv,
        microbatches=options.microbatches or (1 if order.asynchronous else stages),
        weights=options.weights,
        vertical_sync=bool(options.vertical_sync),
        batch_norm=options.running_statistics or "micro",
        switch_after=options.switch_after,
    )


def planned_pipelining(options: argparse.Namespace, comm: MPI.Intracomm) -> Pipelining | None:
    """Load the pipeline of ``--pipeline-plan``. Collective: call on every rank.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    Pipelining or None
        None without ``--pipeline-plan``.

    Raises
    ------
    PlanError
        If the file is not a valid plan, or is for another model, mini-batch or number of ranks.
    """
    if options.pipeline_plan is None:
        return None
    plan = PipelinePlan.load(options.pipeline_plan, comm)
    plan.check_matches(model=options.model, batch=options.batch, ranks=comm.size)
    kind = None
    if plan.kinds and options.devices is not None:
        kind = kind_of_rank(options.devices, comm, torch.device(select_device(options.device, comm)))
    return Pipelining(
        schedule=plan.schedule,
        replicas=plan.replicas,
        chunks=(len(plan.cuts) + 1) // len(plan.plans),
        ppv=None,
        microbatches=plan.microbatches,
        weights=plan.weights,
        vertical_sync=False,
        batch_norm="micro",
        switch_after=None,
        cuts=plan.cuts,
        plans=plan.plans if any(plan.plans) else None,
        kinds=plan.kinds,
        kind=kind,
    )


def _stages(options: argparse.Namespace, ranks: int, chunks: int) -> int:
    """Return the number of stages: from ``--stages``, ``--ppv`` or ``--replicas``, or as many as ranks allow."""
    if options.ppv is not None:
        parts = len(options.ppv) + 1
        if options.stages not in (None, parts // chunks) or parts % chunks:
            wanted = "whole stages" if options.stages is None else f"--stages {options.stages}"
            raise ScheduleError(
                f"--ppv {','.join(map(str, options.ppv))}: splits the model into {parts} parts, which are not "
                f"{wanted} of {chunks} {'part' if chunks == 1 else 'parts'} each"
            )
        return parts // chunks
    if options.stages is not None:
        return int(options.stages)
    replicas = options.replicas or (1,)
    if len(replicas) > 1:
        return len(replicas)
    if ranks % replicas[0]:
        raise ScheduleError(
            f"--replicas {replicas[0]}: {ranks} ranks cannot form stages of {replicas[0]} ranks each. Start a "
            f"multiple of {replicas[0]}, or give the replicas of each stage."
        )
    return ranks // replicas[0]
