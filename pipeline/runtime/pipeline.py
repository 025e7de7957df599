"""``Pipeline``: pipelined training over MPI ranks. Every rank executes its list of a schedule's actions.

The class checks the arguments on all ranks, places the stages and gives mini-batches to the :class:`.Executor`.

Source: Zhao et al. 2020 (BaPipe), 3.2; Zhai et al. 2020 (SparsePipe), III; Zhang, Abdelrahman 2021 (stale weights), 4.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
from distconv.errors import PlanError
from distconv.parallel import check_same_tensors, parallelize
from distconv.pipeline.schedules.actions import Schedule, ScheduleError
from distconv.pipeline.schedules.memory import peak_memory
from distconv.pipeline.schedules.registry import per_stage_replicas
from distconv.pipeline.schedules.registry import schedule as schedule_of_name
from distconv.pipeline.simulation.span import Span
from distconv.pipeline.simulation.timeline import Timeline
from distconv.pipeline.splitting.graph_cuts import SplitError
from distconv.pipeline.splitting.split import split
from distconv.pipeline.stage.passes import Loss, Microbatch, Passes
from distconv.pipeline.stage.stage_inputs import Minibatch
from distconv.pipeline.stage.stage_state import broadcast_stage, collect_state, describe_stages, find_shared
from distconv.pipeline.stage.structures import Boundary, count_samples, flatten, split_samples
from distconv.plan import Plan
from distconv.process import startup, watchdog

from .device_kinds import reorder_ranks
from .executor import Executor
from .pipeline_plan import PipelinePlan
from .placement import StagePlacement, StagePlan, boundary_grids
from .predictions import add_input_gradients, broadcast_boundary, concatenate, evaluation_mode
from .schedule_source import count_chunks, resolve_schedule
from .shared_weights import SharedWeights
from .topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self

BATCH_NORM = ("micro", "deferred")
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Pipeline:
    """Pipelined training of a model that is split into stages, each on its own ranks.

    Ranks are assigned stage by stage, replica by replica. The results are those of one process: of ``SerialPipeline``
    bit for bit, dropout included. Collective: call the constructor and all methods on every rank.

    Source: Zhao et al. 2020 (BaPipe), 3.2; Zhai et al. 2020 (SparsePipe), III; Zhang, Abdelrahman 2021 (stale weights),
    4.

    Parameters
    ----------
    stages : sequence of Module
        All stages in order, identical on every rank; :func:`distconv.pipeline.split` makes them from a model. A stage
        may return tensors, None, numbers and strings, also in tuples, lists and dictionaries. The next stage is called
        with the elements of a tuple or list as positional arguments, or of a dictionary as keyword arguments, if its
        ``forward`` accepts them, and otherwise with the object. A tensor that a later stage needs is passed on by the
        stages between. Stages may share parameters. With an interleaved schedule of C chunks, the modules are the N C
        parts of the model, and stage i of N has the modules i, i + N, i + 2 N and so on.
    comm : MPI.Intracomm
        All ranks of the pipeline.
    schedule : str or Schedule
        Schedule, or its name as in :func:`distconv.pipeline.schedule`.
    loss : callable
        ``loss(output, target)`` returns the mean over samples. The output of the last stage and the target of
        :meth:`step` may be nested values.
    microbatches : int
        Micro-batches into which a synchronous schedule splits a mini-batch, of balanced sizes; at most one per sample.
        For a Schedule object, 1 (the default) stands for the number with which it was made.
    replicas : int or sequence of int, optional
        Replicas of each stage, which take micro-batches round-robin. Default: the schedule's, or 1.
    optimizer : callable, optional
        Makes a torch optimizer of a list of parameters. Default: no update, so that gradients stay in ``.grad``.
    weights : str, optional
        Weight policy of an asynchronous schedule, or "recompute". Default: the schedule's.
    batch_norm : {"micro", "deferred"}
        Running statistics are updated after each micro-batch, or once per mini-batch with the statistics of all of it.
    plans : sequence, optional
        Distribution of each stage over its ranks: a ``dc.Plan`` whose patterns match the names of layers in the stage
        (:func:`split` keeps those of the model), a grid for all layers (parts by axis), or None for one rank. Tensors
        enter and leave a stage on the grid of the plan's first layer. Default: one rank per replica.
    **options
        Options of the schedule.

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

    Warnings
    --------
    If a pass raises an error on one rank, the other ranks wait for its messages. Do not catch the error and continue
    with the pipeline, whose ranks are then in different states. A ``with`` block does not call the collective
    :meth:`close` after an error.

    Notes
    -----
    Random numbers follow from the torch seed of rank 0 (``torch.initial_seed``), the mini-batch, the micro-batch and
    the stage.
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
        check_same_on_all_ranks(comm, "Pipeline's stages", describe_stages(self.modules))
        try_on_all_ranks(comm, lambda: _check_kinds(self.modules, schedule, loss, optimizer, batch_norm), ScheduleError)
        self._chunks = count_chunks(schedule, options)
        if not self.modules or len(self.modules) % self._chunks:
            raise ScheduleError(
                f"pipeline: {len(self.modules)} stages cannot be divided into {self._chunks} chunks on each rank; "
                f"cut the model into {self._chunks * comm.size} stages for {comm.size} ranks"
            )
        count = len(self.modules) // self._chunks
        if replicas is None:
            replicas = (isinstance(schedule, Schedule) and schedule.replicas) or 1
        grids = None if plans is None else boundary_grids(plans, self.modules, count)
        self._plans = [None] * count if plans is None else list(plans)
        self._placement = StagePlacement(comm.size, per_stage_replicas("pipeline", replicas, count), grids)
        self._source = resolve_schedule(
            schedule, count, self._placement.replicas, microbatches=microbatches, weights=weights, options=options
        )
        if self._source.begins.asynchronous and any(isinstance(p, Plan) and p.shard_weights for p in self._plans):
            raise ScheduleError(
                f"pipeline: {schedule} updates weights between the forward and the backward pass of a mini-batch, when "
                "sharded weights are gathered again. Use a synchronous schedule, or plans without shard_weights"
            )
        self._shared = try_on_all_ranks(comm, lambda: find_shared(self.modules, count), ScheduleError)
        _check_sharing(self._shared, self._source.begins)
        with watchdog.waiting(lambda: "comparing the stages' parameters"):
            check_same_tensors(comm, collect_state(self.modules), "Pipeline")
            # One seed for all ranks: random numbers of a pass depend on mini-batch, micro-batch and stage, not on the
            # rank.
            seed: int = comm.bcast(torch.initial_seed())
        # Messages of the pipeline cannot match those of the caller.
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
        example: Any = None,
        kind: str | None = None,
    ) -> Pipeline:
        """Return the pipeline that a plan describes. Collective: call on every rank.

        Parameters
        ----------
        plan : PipelinePlan or path
            Plan, or a file of :meth:`PipelinePlan.save`.
        model : Module or sequence of Module
            Model to split at ``plan.cuts``, or its stages.
        comm : MPI.Intracomm
            All ranks of the pipeline.
        loss, optimizer, batch_norm
            As in :class:`Pipeline`.
        example : object, optional
            Input of the model, if :func:`split` needs one.
        kind : str, optional
            Kind of this rank's device, if the plan is for several kinds. Ranks then take the stages that are for their
            kind.

        Returns
        -------
        Pipeline

        Raises
        ------
        PlanError
            If the plan is invalid, is for another number of ranks or stages or for other kinds of devices, or does not
            fit the stages.
        SplitError
            If the model cannot be split there.
        """
        loaded = plan if isinstance(plan, PipelinePlan) else PipelinePlan.load(plan, comm)
        loaded.check_matches(ranks=comm.size)
        if isinstance(model, nn.Module):
            whole, cuts = model, list(loaded.cuts)
            model = try_on_all_ranks(comm, lambda: split(whole, cuts, example), SplitError)
        if len(model) != len(loaded.cuts) + 1:
            raise PlanError(f"pipeline plan: made for {len(loaded.cuts) + 1} stages, but there are {len(model)}")
        with reorder_ranks(comm, kind, loaded.kinds) as ranks:
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
        stage = self._placement.positions[self._comm.rank].stage
        # With chunks (interleaved) a rank has every count-th stage.
        modules = self.modules[stage :: len(self._placement.replicas)]
        # A stage without parameters uses the device of the other stages.
        everything = (parameter for module in (*modules, *self.modules) for parameter in module.parameters())
        self._device = device = next((parameter.device for parameter in everything), torch.get_default_device())
        self._topology = topology = Topology.create(self._comm, self._placement, device)
        if topology.grid is not None:
            plan = self._plans[stage]
            for module in modules:
                parallelize(module, plan if isinstance(plan, Plan) else topology.grid, comm=topology.stage_comm)
        shared = SharedWeights(self._comm, self._placement, self.modules, self._shared)
        # Chunks of one rank may share parameters; the optimizer gets each once.
        parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
        parameters = [parameter for parameter in parameters if id(parameter) not in shared.borrowed]
        stepper = optimizer(parameters) if optimizer is not None and parameters else None
        replicated = topology.replica_comm.size > 1
        passes = Passes(modules, topology.grid, loss, seed, replicated=replicated, deferred=deferred)
        return Executor(topology, passes, stepper, shared)

    def _restart(self) -> None:
        # Mini-batches begun when the pipeline was last empty, and those whose loss was reported. A schedule counts its
        # mini-batches from _origin, the user and the random numbers from the construction.
        self._origin = self._reported = self._begun
        self._executor.begin(self._source.begins)

    # -- this rank ----------------------------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self._topology.position.stage

    @property
    def replica(self) -> int:
        """Replica of the stage on this rank."""
        return self._topology.position.replica

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Optimizer of this rank's stage, such as for learning-rate schedules; None without parameters or optimizer."""
        return self._executor.optimizer

    @property
    def minibatches(self) -> int:
        """Number of mini-batches begun.

        A resumed run sets it while the pipeline is empty, so that random numbers continue as without the interruption.

        Raises
        ------
        ScheduleError
            If it is set while mini-batches are in flight.
        """
        return self._begun

    @minibatches.setter
    def minibatches(self, count: int) -> None:
        """Set the number of mini-batches begun.

        A resumed run sets it while the pipeline is empty, so that random numbers continue as without the interruption.

        Raises
        ------
        ScheduleError
            If mini-batches are in flight.
        """
        self._check_empty("minibatches")
        self._begun = count
        self._restart()

    # -- training -----------------------------------------------------------------------------------------------------

    def step(self, x: Any, target: Any) -> float | None:
        """Train with a mini-batch. Collective: call on every rank.

        Parameters
        ----------
        x : object
            Input, identical on all ranks: a tensor (N, ...), or a tuple, list or dictionary of inputs, with which the
            first stage is called as with the result of a stage before. Tensors inside of it have N samples or no
            dimensions; other values are given to each micro-batch. The ranks of the first stage read it, and do not
            change it. With a synchronous schedule, tensors that require a gradient receive it on all ranks.
        target : object
            Target, identical on all ranks: a tensor (N, ...), or a nested value like ``x``, which the loss gets. The
            ranks of the last stage read it, and do not change it.

        Returns
        -------
        float or None
            Loss over the full mini-batch, on all ranks. With an asynchronous schedule, the loss of the newest
            mini-batch that has updated every stage; None if there is none yet.

        Raises
        ------
        ShapeError
            If there are no samples, or another number of targets.
        ScheduleError
            If ``x`` requires a gradient and the schedule is asynchronous.
        Exception
            If a pass fails, on the rank where it fails: its exception, with a note of the rank, stage and micro-batch.
        PipelineError
            If ranks are at different steps or have other mini-batches, on a rank that detects it.
        CommunicatorError
            If the pipeline was closed.
        """
        # Nothing is compared here, which would make all ranks wait: headers of messages have the step and the samples.
        check_communicator(self._comm, "Pipeline.step")
        samples = count_samples("step", x=x, target=target)
        needs_gradient = any(tensor.requires_grad for tensor in flatten(x, "x").tensors)
        minibatch = Minibatch(self._begun, samples, needs_gradient)
        if self._source.stream is None:
            self._synchronous_step(x, target, minibatch)
        elif needs_gradient:
            raise ScheduleError(
                f"step: x requires a gradient, which {self._source.begins.name} computes some steps later; use a "
                "synchronous schedule, or pass x.detach()"
            )
        else:
            number = self._begun - self._origin
            self._executor.add_microbatch(number, Microbatch(x, target, 1.0, minibatch, 0))
            self._executor.perform(self._source.stream.step_actions(self.stage, self.replica, number))
            self._begun += 1
            self._report(self._source.stream.completed(number))
        # Asynchronous schedules know the loss of a mini-batch some steps later.
        return self.losses[-1][1] if self._reported > self._origin else None

    def _synchronous_step(self, x: Any, target: Any, minibatch: Minibatch) -> None:
        order, shares = self._begin_microbatches(self._source.make, self._source.microbatches, x, target, minibatch)
        self._executor.perform(order.replica_actions(self.stage, self.replica, self._placement.replicas[self.stage]))
        if minibatch.needs_gradient:
            add_input_gradients(x, self._collect(0, self._executor.input_gradients, len(shares)))
        total = 0.0  # added one by one like a training loop: sum() rounds differently from Python 3.12 on
        for number, share in enumerate(shares):
            total += self._executor.losses[number] * share
        self.losses.append((self._begun, total))
        self._begun += 1
        self._reported = self._begun

    def _begin_microbatches(
        self, make: Callable[[int], Schedule], most: int, x: Any, target: Any, minibatch: Minibatch
    ) -> tuple[Schedule, list[float]]:
        """Begin the schedule of a mini-batch. Return it, and the fraction of the samples in each micro-batch."""
        # A smaller last mini-batch has fewer micro-batches, each of one sample at least.
        count = min(most, minibatch.samples)
        order = make(count)
        self._executor.begin(order)
        # Micro-batches may differ by one sample; the weights make the loss that of the full mini-batch.
        shares = [piece.numel() / minibatch.samples for piece in torch.arange(minibatch.samples).tensor_split(count)]
        pieces = zip(split_samples(x, count), split_samples(target, count), shares, strict=True)
        for number, (piece, its_target, share) in enumerate(pieces):
            self._executor.add_microbatch(number, Microbatch(piece, its_target, share, minibatch, number))
        return order, shares

    def _collect(self, stage: int, found: Mapping[int, Boundary], count: int) -> list[Boundary]:
        """Return tensors of a stage for each of ``count`` micro-batches, on all ranks. Collective."""
        return [
            broadcast_boundary(self._comm, self._placement.ranks(stage, number), found.get(number), self._device)
            for number in range(count)
        ]

    def _report(self, completed: int) -> None:
        for number in range(self._reported - self._origin, completed):
            self.losses.append((self._origin + number, self._executor.losses[number]))
        self._reported = self._origin + completed
        self._executor.drop_microbatches(completed)

    def predict(self, x: Any) -> Any:
        """Return the outputs of the model for a mini-batch, in evaluation mode and without gradients.

        Micro-batches pass through the stages as in training, without backward passes or updates. The mode of each
        module is restored afterwards. Collective: call on every rank.

        Parameters
        ----------
        x : object
            Input as in :meth:`step`, identical on all ranks. The ranks of the first stage read it.

        Returns
        -------
        object
            Result of the last stage for all samples, as plain tensors on all ranks. Tensors are concatenated along the
            samples.

        Raises
        ------
        ShapeError
            If there are no samples, or outputs of micro-batches cannot be concatenated.
        ScheduleError
            If mini-batches are in flight; call :meth:`drain` first.
        Exception
            As in :meth:`step`.
        """
        check_communicator(self._comm, "Pipeline.predict")
        self._check_empty("predict")
        stages = len(self._placement.replicas)
        make, most = self._source.make, self._source.microbatches
        if self._source.stream is not None:
            make, most = partial(schedule_of_name, "gpipe", stages), stages
        minibatch = Minibatch(self._begun, count_samples("predict", x=x))
        order, shares = self._begin_microbatches(make, most, x, None, minibatch)
        actions = order.replica_actions(self.stage, self.replica, self._placement.replicas[self.stage])
        with evaluation_mode(self.modules):
            found = self._executor.predict(actions)
        outputs = self._collect(stages - 1, found, len(shares))
        self._restart()
        return concatenate(outputs)

    def drain(self) -> None:
        """Finish the mini-batches in flight, so that the next one finds an empty pipeline.

        Collective: call on every rank.
        """
        steps = self._begun - self._origin
        if self._source.stream is not None and steps:
            self._executor.perform(self._source.stream.remaining_actions(self.stage, self.replica, steps))
            self._report(steps)
        # Payloads of sends stay alive until the receivers have them.
        self._topology.p2p.flush()
        self._restart()

    def switch(
        self, schedule: str | Schedule, microbatches: int = 1, weights: str | None = None, **options: Any
    ) -> None:
        """Drain, and continue with another schedule. Collective: call on every rank.

        Source: Zhang, Abdelrahman 2021 (stale weights), 4.2 (hybrid training).

        Parameters
        ----------
        schedule, microbatches, weights, **options
            As in :class:`Pipeline`.

        Raises
        ------
        ScheduleError
            If the schedule has another number of chunks, or does not fit.
        MismatchError
            If ranks pass different arguments.
        """
        check_same_on_all_ranks(self._comm, "switch", f"{schedule!r}, {microbatches=}, {weights=}, {options=}")
        if count_chunks(schedule, options) != self._chunks:
            raise ScheduleError(f"switch: each rank has {self._chunks} chunks of the model, which cannot change")
        replicas = self._placement.replicas
        source = resolve_schedule(
            schedule, len(replicas), replicas, microbatches=microbatches, weights=weights, options=options
        )
        _check_sharing(self._shared, source.begins)
        self.drain()
        self._source = source
        self._restart()

    # -- the full model -----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Copy the parameters and buffers of all stages to every rank, so that ``stages`` is the trained model.

        Collective: call on every rank.

        Raises
        ------
        ScheduleError
            If mini-batches are in flight; call :meth:`drain` first.
        """
        self._check_empty("synchronize")
        for index, module in enumerate(self.modules):
            stage = index % len(self._placement.replicas)
            broadcast_stage(self._comm, module, self._placement.ranks(stage, 0)[0], owned=stage == self.stage)

    def _check_empty(self, what: str) -> None:
        if self._source.stream is not None and self._begun > self._origin:
            raise ScheduleError(
                f"{what}: {self._begun - self._origin} mini-batches may be in flight; call drain() first"
            )

    @contextmanager
    def traced(self) -> Iterator[Callable[[], Timeline]]:
        """Measure the passes inside a ``with`` block. Collective: enter on every rank.

        Yields
        ------
        callable
            Returns the :class:`Timeline`, in seconds. Collective: call on every rank.

        Examples
        --------
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
        """Drain, and free the pipeline's communicators. Collective: call on every rank.

        A stage's grid stays, because its model needs it.
        """
        self.drain()
        self._executor.close()
        self._topology.close()
        self._comm.Free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # After a failure other ranks may not get here, and close(), which is collective, would wait for them.
        if kind is None:
            self.close()


def _check_sharing(shared: Sequence[Sequence[str]], schedule: Schedule) -> None:
    """Raise ScheduleError if stages share parameters, but update them at different times."""
    if shared and schedule.asynchronous:
        raise ScheduleError(
            f"pipeline: {' and '.join(shared[0])} are one tensor, which {schedule.name} would update on each stage at "
            "another time; use a synchronous schedule, give each stage its own, or cut the model elsewhere"
        )


def _check_kinds(modules: Sequence[Any], schedule: object, loss: object, optimizer: object, batch_norm: object) -> None:
    """Raise ScheduleError if an argument has the wrong type."""
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
