"""Pipelined training over MPI ranks: every rank executes its list of a schedule's actions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import nn

from distconv.communication.agreement import (
    check_communicator,
    check_mpi_running,
    check_same_on_all_ranks,
    try_on_all_ranks,
)
from distconv.errors import PlanError, ShapeError
from distconv.parallel import check_same_tensors, parallelize
from distconv.pipeline.schedules.actions import Schedule, ScheduleError
from distconv.pipeline.schedules.memory import peak_memory
from distconv.pipeline.schedules.registry import per_stage_replicas
from distconv.pipeline.simulation.span import Span
from distconv.pipeline.simulation.timeline import Timeline
from distconv.pipeline.splitting.graph_cuts import SplitError
from distconv.pipeline.splitting.split import split
from distconv.pipeline.stage.passes import Loss, Microbatch, Passes
from distconv.pipeline.stage.stage_inputs import Minibatch
from distconv.pipeline.stage.stage_state import check_separate, described, spread, state_of
from distconv.plan import Plan
from distconv.process import startup, watchdog

from .device_kinds import in_order
from .executor import Executor
from .pipeline_plan import PipelinePlan
from .placement import StagePlacement, StagePlan, boundary_grids
from .schedule_source import chunks_of, course
from .topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self

BATCH_NORM = ("micro", "deferred")
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Pipeline:
    """Trains a model that is cut into stages, each on its own ranks.

    ``stages``: all modules, in order and alike on every rank (:func:`distconv.pipeline.split` cuts a model). Each
    returns a tensor or a tuple of tensors, which the next one is called with as its arguments; a tensor that a later
    stage needs is handed on. ``schedule``: a schedule, or a name (see :func:`distconv.pipeline.schedule`) with its
    ``options``. ``loss(output, target)`` is the mean over samples. ``microbatches``: into how many a synchronous
    schedule cuts a mini-batch, at most one per sample, of balanced sizes. ``replicas`` of each stage (one number: of
    all) take micro-batches in turn. ``plans`` say how the ranks of each stage share its work: a ``dc.Plan`` of its
    layers, whose patterns match their names in the stage (:func:`split` keeps those of the model), a grid for all of
    them (parts by axis), or None: one rank. A plan's first layer is on the grid on which tensors enter and leave.
    Ranks go stage by stage, replica by replica. ``optimizer`` makes a torch optimizer of a list of parameters.
    ``weights`` is the policy of asynchronous schedules, or "recompute". ``batch_norm``: running statistics after each
    micro-batch ("micro"), or once per mini-batch as if it had been whole ("deferred"). Random numbers follow from the
    first rank's torch seed. Collective over ``comm``, as all methods.

    The numbers are those of one process: of ``SerialPipeline`` bit for bit, with dropout too.

    Source: BaPipe 3.2, SparsePipe III, stale weights 4; DESIGN 8.

    Raises
    ------
    ScheduleError
        If schedule, options, micro-batches or the number of stages do not fit each other.
    GridError
        If the stages need another number of ranks.
    PlanError
        If a plan does not fit its stage.
    MismatchError
        If ranks pass different arguments or parameters.
    """

    def __init__(  # noqa: PLR0917  (a fixed public signature)
        self,
        stages: Sequence[nn.Module],
        comm: MPI.Intracomm,
        schedule: str | Schedule,
        loss: Loss,
        microbatches: int = 1,
        replicas: int | Sequence[int] | None = None,
        optimizer: MakeOptimizer | None = None,
        weights: str | None = None,
        batch_norm: str = "micro",
        *,
        plans: Sequence[StagePlan] | None = None,
        **options: Any,
    ) -> None:
        check_mpi_running()
        startup.start(comm)
        self.modules = list(stages)
        arguments = f"{schedule!r}, {microbatches=}, {replicas=}, {weights=}, {batch_norm=}, {plans=}, {options=}"
        check_same_on_all_ranks(comm, "Pipeline's arguments", arguments)
        check_same_on_all_ranks(comm, "Pipeline's stages", described(self.modules))
        try_on_all_ranks(comm, lambda: _check_kinds(self.modules, schedule, loss, optimizer, batch_norm), ScheduleError)
        self._chunks = chunks_of(schedule, options)
        if not self.modules or len(self.modules) % self._chunks:
            raise ScheduleError(
                f"{len(self.modules)} stages cannot be {self._chunks} on each rank: "
                f"cut the model into {self._chunks * comm.size} for {comm.size} ranks"
            )
        count = len(self.modules) // self._chunks
        if replicas is None:
            replicas = (isinstance(schedule, Schedule) and schedule.replicas) or 1
        grids = None if plans is None else boundary_grids(plans, self.modules, count)
        self._plans = [None] * count if plans is None else list(plans)
        self._placement = StagePlacement(comm.size, per_stage_replicas("pipeline", replicas, count), grids)
        self._source = course(
            schedule, count, self._placement.replicas, microbatches=microbatches, weights=weights, options=options
        )
        check_separate(self.modules, count)
        with watchdog.waiting(lambda: "comparing the stages' parameters"):
            check_same_tensors(comm, state_of(self.modules), "Pipeline")
            seed: int = comm.bcast(torch.initial_seed())
        self._comm = comm.Dup()
        self._executor = self._new_executor(loss, optimizer, batch_norm == "deferred", seed)
        self.losses: list[tuple[int, float]] = []
        """Mini-batches, counted from 0, and their losses; the same on all ranks."""
        self._begun = 0
        self._restart()

    @classmethod
    def from_plan(
        cls,
        plan: PipelinePlan | str | os.PathLike[str],
        model: nn.Module | Sequence[nn.Module],
        comm: MPI.Intracomm,
        loss: Loss,
        optimizer: MakeOptimizer | None = None,
        *,
        batch_norm: str = "micro",
        example: torch.Tensor | None = None,
        kind: str | None = None,
    ) -> Pipeline:
        """The pipeline that ``plan``, or the file of this name, describes, for a model that it cuts or its stages.

        ``example``: an input of the model, as :func:`split` may need one. ``kind``: that of this rank's device, for a
        plan that is for several; the ranks then take the stages that are for their kinds.

        Raises
        ------
        PlanError
            If the plan is none, is for another number of ranks or of stages or other kinds of devices, or does not fit
            the stages.
        SplitError
            If the model cannot be cut there.
        """
        loaded = plan if isinstance(plan, PipelinePlan) else PipelinePlan.load(plan, comm)
        loaded.check_for(ranks=comm.size)
        if isinstance(model, nn.Module):
            whole, cuts = model, list(loaded.cuts)
            model = try_on_all_ranks(comm, lambda: split(whole, cuts, example), SplitError)
        if len(model) != len(loaded.cuts) + 1:
            raise PlanError(f"pipeline plan: made for {len(loaded.cuts) + 1} stages, but there are {len(model)}")
        with in_order(comm, kind, loaded.kinds) as ranks:
            return cls(
                model,
                ranks,
                loaded.schedule,
                loss,
                microbatches=loaded.microbatches,
                replicas=loaded.replicas,
                optimizer=optimizer,
                weights=loaded.weights,
                batch_norm=batch_norm,
                plans=loaded.plans,
            )

    def _new_executor(self, loss: Loss, optimizer: MakeOptimizer | None, deferred: bool, seed: int) -> Executor:
        stage = self._placement.places[self._comm.rank].stage
        modules = self.modules[stage :: len(self._placement.replicas)]
        # A stage without parameters computes where the others do.
        everything = (parameter for module in (*modules, *self.modules) for parameter in module.parameters())
        device = next((parameter.device for parameter in everything), torch.get_default_device())
        self._topology = topology = Topology.of(self._comm, self._placement, device)
        if topology.grid is not None:
            plan = self._plans[stage]
            for module in modules:
                parallelize(module, plan if isinstance(plan, Plan) else topology.grid, comm=topology.group)
        parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
        stepper = optimizer(parameters) if optimizer is not None and parameters else None
        replicated = topology.twins.size > 1
        passes = Passes(modules, topology.grid, loss, seed, replicated=replicated, deferred=deferred)
        return Executor(topology, passes, stepper)

    def _restart(self) -> None:
        self._origin = self._reported = self._begun
        self._executor.begin(self._source.begins)

    # -- what it is on this rank --------------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self._topology.place.stage

    @property
    def replica(self) -> int:
        """Which replica of its stage this rank is."""
        return self._topology.place.replica

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's stage, for learning-rate schedules; None where it has no parameters."""
        return self._executor.optimizer

    @property
    def minibatches(self) -> int:
        """Mini-batches begun. A resumed run sets it, while none is under way: random numbers go on as they would have.

        Raises
        ------
        ScheduleError
            If mini-batches are under way.
        """
        return self._begun

    @minibatches.setter
    def minibatches(self, count: int) -> None:
        self._check_empty("minibatches")
        self._begun = count
        self._restart()

    # -- training -----------------------------------------------------------------------------------------------------

    def step(self, x: torch.Tensor, target: torch.Tensor) -> float | None:
        """Train with a mini-batch x (N, ...) and its target (N, ...), the same on all ranks.

        The first stage's ranks read x, the last one's the target. Returns, on all ranks, the loss over the whole
        mini-batch; an asynchronous schedule that of the newest mini-batch that every stage has learnt from, None while
        there is none.

        Raises
        ------
        ShapeError
            If there are no samples, or not as many targets.
        PipelineError
            On the rank where a pass fails.
        CommunicatorError
            If the pipeline was closed.
        """
        check_communicator(self._comm, "Pipeline.step")
        for name, value in (("x", x), ("target", target)):
            if not isinstance(value, torch.Tensor):
                raise ShapeError(f"step: {name} is a {type(value).__name__}; pass a torch.Tensor, samples first")
        if not x.dim() or not target.dim() or not len(x) or len(x) != len(target):
            raise ShapeError(
                f"step: x {tuple(x.shape)} and target {tuple(target.shape)} need as many samples, one or more"
            )
        if self._source.stream is None:
            self._synchronous_step(x, target)
        else:
            number = self._begun - self._origin
            self._executor.feed(number, Microbatch(x, target, 1.0, Minibatch(self._begun, len(x)), 0))
            self._executor.perform(self._source.stream.step(self.stage, self.replica, number))
            self._begun += 1
            self._report(self._source.stream.completed(number))
        return self.losses[-1][1] if self._reported > self._origin else None

    def _synchronous_step(self, x: torch.Tensor, target: torch.Tensor) -> None:
        count = min(self._source.microbatches, len(x))
        order = self._source.make(count)
        self._executor.begin(order)
        pieces = zip(x.tensor_split(count), target.tensor_split(count), strict=True)
        shares, minibatch = [], Minibatch(self._begun, len(x))
        for number, (piece, its_target) in enumerate(pieces):
            shares.append(len(piece) / len(x))
            self._executor.feed(number, Microbatch(piece, its_target, shares[-1], minibatch, number))
        self._executor.perform(order.of_replica(self.stage, self.replica, self._placement.replicas[self.stage]))
        total = 0.0  # added up one by one, as a training loop does: sum() rounds otherwise from Python 3.12 on
        for number, share in enumerate(shares):
            total += self._executor.losses[number] * share
        self.losses.append((self._begun, total))
        self._begun += 1
        self._reported = self._begun

    def _report(self, completed: int) -> None:
        for number in range(self._reported - self._origin, completed):
            self.losses.append((self._origin + number, self._executor.losses[number]))
        self._reported = self._origin + completed
        self._executor.forget(completed)

    def drain(self) -> None:
        """Finish the mini-batches that are under way; the next one finds an empty pipeline."""
        steps = self._begun - self._origin
        if self._source.stream is not None and steps:
            self._executor.perform(self._source.stream.rest(self.stage, self.replica, steps))
            self._report(steps)
        self._topology.p2p.flush()
        self._restart()

    def switch(
        self, schedule: str | Schedule, microbatches: int = 1, weights: str | None = None, **options: Any
    ) -> None:
        """Drain, and go on with another schedule (hybrid training: stale weights, 4.2).

        Raises
        ------
        ScheduleError
            If the schedule has another number of chunks.
        """
        check_same_on_all_ranks(self._comm, "switch", f"{schedule!r}, {microbatches=}, {weights=}, {options=}")
        if chunks_of(schedule, options) != self._chunks:
            raise ScheduleError(f"switch: each rank has {self._chunks} chunks of the model, which cannot change")
        replicas = self._placement.replicas
        source = course(schedule, len(replicas), replicas, microbatches=microbatches, weights=weights, options=options)
        self.drain()
        self._source = source
        self._restart()

    # -- the whole model ----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Bring the parameters and buffers of all stages to every rank, so that ``stages`` is the trained model.

        Raises
        ------
        ScheduleError
            If mini-batches are under way: drain first.
        """
        self._check_empty("synchronize")
        for index, module in enumerate(self.modules):
            stage = index % len(self._placement.replicas)
            spread(self._comm, module, self._placement.ranks(stage, 0)[0], owned=stage == self.stage)

    def _check_empty(self, what: str) -> None:
        if self._source.stream is not None and self._begun > self._origin:
            raise ScheduleError(
                f"{what}: {self._begun - self._origin} mini-batches may be under way; call drain() first"
            )

    @contextmanager
    def traced(self) -> Iterator[Callable[[], Timeline]]:
        """Measure when the passes inside run; the function that it gives makes their timeline, in seconds.

        ::

            with pipe.traced() as timeline:
                pipe.step(x, target)
            timeline().to_chrome_trace("measured.json")
        """
        with watchdog.waiting(lambda: "the start of a trace"):
            self._comm.Barrier()
        begun = time.perf_counter()
        spans: list[Span] = []
        self._executor.spans = spans
        try:
            yield lambda: self._timeline(begun, spans)
        finally:
            self._executor.spans = None

    def _timeline(self, begun: float, spans: Sequence[Span]) -> Timeline:
        mine = [replace(span, start=span.start - begun, end=span.end - begun) for span in spans]
        with watchdog.waiting(lambda: "collecting a trace"):
            every = [span for part in self._comm.allgather(mine) for span in part]
        work = sum(span.end - span.start for span in every)
        followed = self._executor.schedule
        in_flight = [stage.in_flight for stage in peak_memory(followed)]
        return Timeline(followed, every, self._placement.replicas, work, in_flight)

    def close(self) -> None:
        """Finish what is under way and free the pipeline's communicators; a stage's grid stays, for its model."""
        self.drain()
        self._topology.close()
        self._comm.Free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # After a failure other ranks may be elsewhere: closing, which all do together, would wait for them.
        if kind is None:
            self.close()


def _check_kinds(modules: Sequence[Any], schedule: object, loss: object, optimizer: object, batch_norm: object) -> None:
    """Raise ScheduleError for an argument that is something else than it should be."""
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ScheduleError(f"stage {index} is a {type(module).__name__}, not an nn.Module")
    if not isinstance(schedule, (str, Schedule)):
        raise ScheduleError(f"schedule={schedule!r} is neither a name nor a Schedule")
    if not callable(loss):
        raise ScheduleError(f"loss is a {type(loss).__name__}; pass a function of output and target")
    if not callable(optimizer) and optimizer is not None:
        raise ScheduleError(
            f"optimizer is a {type(optimizer).__name__}; pass a function of the parameters that makes one, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if batch_norm not in BATCH_NORM:
        raise ScheduleError(f"batch_norm={batch_norm!r} must be one of {', '.join(BATCH_NORM)}")
