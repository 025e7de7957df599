"""Pipeline plans: split points, ranks and distributions of each stage, and the schedule.

``distconv explore`` writes plan files, and :meth:`.Pipeline.from_plan` reads them::

    {"format": "distconv-pipeline-plan", "version": 1, "model": "resnet20", "batch": 32, "ranks": 3, "stages": 2,
     "cuts": ["layer3.0.conv1"], "replicas": [1, 1],
     "plans": [{"ranks": 2, "layers": {"conv1": {"n": 2}, "layer?.*": {"h": 2}}}, null],
     "schedule": "1f1b-so", "microbatches": 4, "weights": null}

``plans`` has for each stage the layers' grids as in a plan file, one grid (``{"h": 2}``), or null for one rank. A plan
for several kinds of devices has ``"kinds": ["titanxp", "titanxp", "v100"]``, one for each rank, stage by stage.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from mpi4py import MPI

from distconv.arrangement import Arrangement
from distconv.communication.agreement import try_for_same_result
from distconv.errors import GridError, PlanError
from distconv.pipeline.schedules.actions import ScheduleError
from distconv.pipeline.schedules.registry import FAMILIES, schedule
from distconv.plan import Plan, PlanFields
from distconv.text_files import File, decode, load
from distconv.whole_files import write_file

from .placement import StagePlan

FORMAT = "distconv-pipeline-plan"
VERSION = 1


class _PipelinePlanFile(File, omit_defaults=True):
    format: Literal["distconv-pipeline-plan"]
    version: Literal[1]
    model: str
    batch: int
    ranks: int
    stages: int
    cuts: list[str]
    replicas: list[int]
    plans: list[dict[str, Any] | None]
    schedule: str
    microbatches: int
    weights: str | None
    kinds: list[str] = msgspec.field(default_factory=list)


@dataclass(frozen=True, eq=True)
class PipelinePlan:
    """Plan of pipelined training.

    Attributes
    ----------
    model : str
        Name of the model, for information.
    batch : int
        Samples of a mini-batch.
    ranks : int
        Ranks of all stages.
    cuts : tuple of str
        Submodules that begin the second part of the model, the third, and so on. With one chunk, parts are stages.
    replicas : tuple of int
        Replicas of each stage.
    plans : tuple
        Distribution of each stage over the ranks of one replica, as in :class:`.Pipeline`.
    schedule : str
    microbatches : int
    weights : str or None
        As in :class:`.Pipeline`.
    kinds : tuple of str
        Kind of device of each rank; empty if all ranks are equal.

    Raises
    ------
    PlanError
        If a value is invalid, or values do not fit each other.
    """

    model: str
    batch: int
    ranks: int
    cuts: tuple[str, ...]
    replicas: tuple[int, ...]
    plans: tuple[StagePlan, ...]
    schedule: str
    microbatches: int = 1
    weights: str | None = None
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise PlanError(f"pipeline plan: model={self.model!r} must be a name")
        for name in ("batch", "ranks", "microbatches"):
            _check_positive(name, getattr(self, name))
        _check_names("cuts", self.cuts, "of a submodule")
        _check_names("kinds", self.kinds, "of a kind of device")
        for count in self.replicas:
            _check_positive("replicas", count)
        if self.microbatches > self.batch:
            raise PlanError(
                f"pipeline plan: {self.microbatches} micro-batches need as many samples, but batch={self.batch}"
            )
        self._check_stages()
        self._check_ranks()

    def _check_stages(self) -> None:
        stages = len(self.plans)
        if len(self.replicas) != stages:
            raise PlanError(
                f"pipeline plan: {len(self.replicas)} replicas, but {stages} plans; each stage has one of both"
            )
        try:  # schedule() checks the name, the weight policy and the counts
            order = schedule(self.schedule, stages, self.microbatches, weights=self.weights)
        except (ScheduleError, TypeError) as error:
            raise PlanError(f"pipeline plan: {error}") from error
        if FAMILIES[self.schedule].concurrent:
            raise PlanError(f"pipeline plan: {self.schedule} can be simulated, not run")
        if order.asynchronous and self.microbatches > 1:
            raise PlanError(
                f"pipeline plan: {self.schedule} updates after every mini-batch, but microbatches={self.microbatches}"
            )
        if len(self.cuts) + 1 != stages * order.chunks:
            raise PlanError(
                f"pipeline plan: {len(self.cuts)} cuts make {len(self.cuts) + 1} parts, but {stages} stages of "
                f"{self.schedule} need {stages * order.chunks}"
            )

    def _check_ranks(self) -> None:
        sizes = [_size(index, plan) for index, plan in enumerate(self.plans)]
        needed = sum(count * size for count, size in zip(self.replicas, sizes, strict=True))
        if needed != self.ranks:
            raise PlanError(
                f"pipeline plan: its stages need {needed} ranks (replicas {list(self.replicas)} of {sizes} ranks), but "
                f"ranks={self.ranks}"
            )
        if self.kinds and len(self.kinds) != self.ranks:
            raise PlanError(f"pipeline plan: kinds of {len(self.kinds)} ranks, but ranks={self.ranks}")

    # -- files --------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | os.PathLike[str], comm: MPI.Intracomm | None = None) -> PipelinePlan:
        """Return the plan in a file of :meth:`save`. Collective: call on every rank.

        Parameters
        ----------
        path : str or path
            File to read.
        comm : MPI.Intracomm, optional
            Ranks that read it. Default: all ranks.

        Returns
        -------
        PipelinePlan
            Identical on all ranks.

        Raises
        ------
        PlanError
            On all ranks, if any of them cannot read the file or its content is invalid.
        MismatchError
            If the ranks read different plans.
        """
        return try_for_same_result(comm or MPI.COMM_WORLD, lambda: cls._read(Path(path)), PlanError, "pipeline plan")

    @classmethod
    def _read(cls, path: Path) -> PipelinePlan:
        file = load(path, _PipelinePlanFile, "pipeline plan", PlanError)
        if file.stages != len(file.plans):
            raise PlanError(f"pipeline plan {path}: stages={file.stages}, but there are {len(file.plans)} plans")
        # The fields of the file have the names of those of the class; only "stages" is additional.
        content = {field.name: getattr(file, field.name) for field in fields(cls)}
        content |= {name: tuple(content[name]) for name in ("cuts", "replicas", "kinds")}
        try:
            content["plans"] = tuple(stage_plan(index, entry) for index, entry in enumerate(file.plans))
            return cls(**content)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Every rank that calls this method writes the file.

        Parameters
        ----------
        path : str or path
            File to write.
        """
        write_file(path, self.to_json() + "\n")

    def to_json(self) -> str:
        """Return the content of a plan file."""
        plans = [plan_entry(plan) for plan in self.plans]
        content = {**vars(self), "format": FORMAT, "version": VERSION, "stages": len(plans), "plans": plans}
        return json.dumps(msgspec.to_builtins(msgspec.convert(content, _PipelinePlanFile)), indent=1)

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_matches(self, **given: object) -> None:
        """Check that the plan was made for these values.

        Parameters
        ----------
        **given
            ``ranks``, ``batch`` or ``model``.

        Raises
        ------
        PlanError
            If the plan has other values.
        """
        for name, value in given.items():
            own = getattr(self, name)
            if own != value:
                raise PlanError(
                    f"pipeline plan: made for {name}={own!r}, found {name}={value!r}; use {own!r}, or make another "
                    "plan with distconv explore"
                )


def plan_entry(plan: StagePlan) -> dict[str, Any] | None:
    """Return the distribution of a stage as a plan file has it."""
    if isinstance(plan, Plan):
        return plan.entries()
    return None if plan is None else dict(plan)


def stage_plan(index: int, entry: dict[str, Any] | None) -> StagePlan:
    """Return the distribution that :func:`plan_entry` wrote.

    Parameters
    ----------
    index : int
        Stage, for the error message.
    entry : dict or None

    Returns
    -------
    Plan, dict or None

    Raises
    ------
    PlanError
        If the entry is invalid.
    """
    where = f"pipeline plan: plans[{index}]"
    if entry is None or "layers" not in entry:
        return entry
    file = decode(entry, PlanFields, where, PlanError)
    try:
        return Plan(file.layers, file.ranks, batch_norm=file.batch_norm, shard_weights=file.shard_weights)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def _size(index: int, plan: StagePlan) -> int:
    """Return the ranks of one replica of a stage."""
    if plan is None:
        return 1
    if isinstance(plan, Plan):
        if plan.ranks is None:
            raise PlanError(
                f"pipeline plan: plans[{index}] has layers, but no ranks; add the number of ranks that it is for"
            )
        return plan.ranks
    if not isinstance(plan, Mapping):
        raise PlanError(f"pipeline plan: plans[{index}]={plan!r} is neither a Plan, nor a grid, nor None")
    try:
        return math.prod(Arrangement(**cast("dict[str, int]", plan)).shape.values())
    except GridError as error:
        raise PlanError(f"pipeline plan: plans[{index}]: {error}") from error


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"pipeline plan: {name}={value!r} must be a positive whole number")


def _check_names(name: str, values: Sequence[object], of: str) -> None:
    for value in values:
        if not isinstance(value, str):
            raise PlanError(f"pipeline plan: {name}: {value!r} must be the name {of}")
