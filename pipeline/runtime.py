"""Pipelined training over MPI ranks: every rank executes its list of a schedule's actions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from distconv import watchdog
from distconv.agreement import agree, check_running
from distconv.errors import ShapeError
from distconv.grid import ProcessGrid
from distconv.parallel import check_equal, parallelize
from distconv.tensor import DistTensor

from .actions import Schedule, ScheduleError
from .families import FAMILIES, per_stage_replicas, schedule
from .mail import Mailbox
from .memory import peak_memory
from .placement import Placement
from .stream import Stream
from .timeline import Span, Timeline
from .worker import Feed, Loss, Worker

BATCH_NORM = ("micro", "deferred")


class Pipeline:
    """Trains a model that is cut into stages, each on its own ranks.

    ``stages``: all modules, in order and alike on every rank (:func:`distconv.pipeline.split` cuts a model); each is
    called with what the one before returns, a tensor or a tuple of tensors, and a tensor that a later stage needs is
    handed on. ``schedule``: a name (see :func:`distconv.pipeline.schedule`), with its ``options``. ``loss(output,
    target)`` is the mean over samples. ``microbatches``: into how many a synchronous schedule cuts a mini-batch, at
    most one per sample, of balanced sizes. ``replicas`` of each stage (one number: of all) take micro-batches in turn;
    ``grids`` (extents by axis, None: one rank) distribute the tensors within a stage. Ranks go stage by stage, replica
    by replica. ``optimizer`` makes a torch optimizer of a list of parameters. ``weights`` is the policy of
    asynchronous schedules, or "recompute". ``batch_norm``: running statistics after each micro-batch ("micro"), or
    once per mini-batch as if it had been whole ("deferred"). Collective over ``comm``, as all of its methods.

    The numbers are those of one process: of ``SerialPipeline`` bit for bit, with dropout too.

    Source: BaPipe 3.2, SparsePipe III, stale weights 4; DESIGN 8.

    Raises
    ------
    ScheduleError
        If schedule, options, micro-batches or the number of stages do not fit each other.
    GridError
        If the stages need another number of ranks.
    MismatchError
        If ranks pass different arguments or parameters.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        comm: MPI.Intracomm,
        schedule: str,
        loss: Loss,
        microbatches: int = 1,
        replicas: int | Sequence[int] | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        weights: str | None = None,
        batch_norm: str = "micro",
        grids: Sequence[Mapping[str, int] | None] | None = None,
        **options: Any,
    ) -> None:
        check_running()
        self.modules = list(stages)
        described = f"{schedule}, {microbatches=}, {replicas=}, {weights=}, {batch_norm=}, {grids=}, {options=}"
        agree(comm, "Pipeline", f"{_described(self.modules)}; {described}; seed {torch.initial_seed()}")
        if batch_norm not in BATCH_NORM:
            raise ScheduleError(f"batch_norm={batch_norm!r} must be one of {', '.join(BATCH_NORM)}")
        self._chunks = _chunks_of(schedule, options)
        if not self.modules or len(self.modules) % self._chunks:
            raise ScheduleError(f"{schedule}: {len(self.modules)} stages cannot be {self._chunks} chunks on each rank")
        count = len(self.modules) // self._chunks
        self._placement = Placement(comm.size, per_stage_replicas(schedule, replicas or 1, count), grids)
        self._follow(schedule, microbatches, weights, options)
        _check_separate(self.modules, count)
        with watchdog.waiting(lambda: "comparing the stages' parameters"):
            check_equal(comm, _state(self.modules))
        self._comm = comm.Dup()
        self._worker = self._work(loss, optimizer, batch_norm)
        self.losses: list[tuple[int, float]] = []
        """Mini-batches, counted from 0, and their losses; the same on all ranks."""
        self._begun = 0
        self._restart()

    def _work(
        self, loss: Loss, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None, batch_norm: str
    ) -> Worker:
        place = self._placement.places[self._comm.rank]
        places = self._placement.places
        group = MPI.Intracomm(self._comm.Split(places.index(place._replace(member=0)), self._comm.rank))
        twins = MPI.Intracomm(self._comm.Split(places.index(place._replace(replica=0)), self._comm.rank))
        shape = self._placement.grids[place.stage]
        grid = ProcessGrid(group, **shape.shape) if shape.size > 1 else None
        modules = self.modules[place.stage :: len(self._placement.replicas)]
        if grid is not None:
            for module in modules:
                parallelize(module, grid)
        parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
        device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        mailbox = Mailbox(self._comm, self._placement, place, grid, device)
        made = optimizer(parameters) if optimizer is not None and parameters else None
        self._mailbox = mailbox
        return Worker(place, modules, grid, mailbox, twins, loss, made, batch_norm, torch.initial_seed())

    def _follow(self, name: str, microbatches: int, weights: str | None, options: Mapping[str, Any]) -> None:
        """Take up a schedule; all that can be wrong with it is found here, before anything is sent."""
        count = len(self._placement.replicas)
        family = FAMILIES.get(name)
        if family is not None and family.concurrent:
            raise ScheduleError(f"{name}: forward and backward at the same time can be simulated, not run on one rank")
        given = dict(options) | ({} if weights is None else {"weights": weights})
        if family is not None and "replicas" in family.options:
            given["replicas"] = self._placement.replicas
        if "switch_after" in given:
            raise ScheduleError(f"{name}: switch_after is for simulations; call switch() when it is time")
        first = schedule(name, count, 1, **given)
        self._stream = Stream(name, count, **given) if first.asynchronous else None
        if first.asynchronous and first.replicas != self._placement.replicas:
            raise ScheduleError(f"{name} has no replicas; give every stage one rank, or use pipedream")
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise ScheduleError(f"{name}: microbatches={microbatches!r} is not a whole number of at least 1")
        if first.asynchronous and microbatches > 1:
            raise ScheduleError(
                f"{name}: microbatches={microbatches}, but it updates after every mini-batch; pass 1 and smaller ones"
            )
        self._microbatches = microbatches
        self._make: Callable[[int], Schedule] = lru_cache(maxsize=None)(lambda m: schedule(name, count, m, **given))

    def _restart(self) -> None:
        self._origin = self._reported = self._begun
        self._worker.begin(self._make(1) if self._stream is None else self._stream.schedule)

    # -- what it is on this rank --------------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self._worker.place.stage

    @property
    def replica(self) -> int:
        """Which replica of its stage this rank is."""
        return self._worker.place.replica

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's stage, for learning-rate schedules; None where it has no parameters."""
        return self._worker.optimizer

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
        """
        if not x.dim() or not target.dim() or not len(x) or len(x) != len(target):
            raise ShapeError(
                f"step: x {tuple(x.shape)} and target {tuple(target.shape)} need as many samples, one or more"
            )
        if self._stream is None:
            self._synchronous_step(x, target)
        else:
            number = self._begun - self._origin
            self._worker.feed(number, Feed(x, target, 1.0, self._begun, 0))
            self._worker.perform(self._stream.step(self.stage, self.replica, number))
            self._begun += 1
            self._report(self._stream.completed(number))
        return self.losses[-1][1] if self._reported > self._origin else None

    def _synchronous_step(self, x: torch.Tensor, target: torch.Tensor) -> None:
        count = min(self._microbatches, len(x))
        made = self._make(count)
        self._worker.begin(made)
        pieces = zip(x.tensor_split(count), target.tensor_split(count), strict=True)
        shares = []
        for number, (piece, its_target) in enumerate(pieces):
            shares.append(len(piece) / len(x))
            self._worker.feed(number, Feed(piece, its_target, shares[-1], self._begun, number))
        self._worker.perform(made.of_replica(self.stage, self.replica, self._placement.replicas[self.stage]))
        total = sum(self._worker.losses[number] * share for number, share in enumerate(shares))
        self.losses.append((self._begun, total))
        self._begun += 1
        self._reported = self._begun

    def _report(self, completed: int) -> None:
        for number in range(self._reported - self._origin, completed):
            self.losses.append((self._origin + number, self._worker.losses[number]))
        self._reported = self._origin + completed
        self._worker.forget(completed)

    def drain(self) -> None:
        """Finish the mini-batches that are under way; the next one finds an empty pipeline."""
        steps = self._begun - self._origin
        if self._stream is not None and steps:
            self._worker.perform(self._stream.rest(self.stage, self.replica, steps))
            self._report(steps)
        self._mailbox.flush()
        self._restart()

    def switch(self, schedule: str, microbatches: int = 1, weights: str | None = None, **options: Any) -> None:
        """Drain, and go on with another schedule (hybrid training: stale weights, 4.2)."""
        agree(self._comm, "switch", f"{schedule}, {microbatches=}, {weights=}, {options=}")
        if _chunks_of(schedule, options) != self._chunks:
            raise ScheduleError(f"{schedule}: each rank has {self._chunks} chunks of the model, which cannot change")
        before = self._stream
        self._follow(schedule, microbatches, weights, options)
        after, self._stream = self._stream, before
        self.drain()
        self._stream = after
        self._restart()

    # -- the whole model ----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Bring the parameters and buffers of all stages to every rank, so that ``stages`` is the trained model.

        Raises
        ------
        ScheduleError
            If mini-batches are under way: drain first.
        """
        if self._stream is not None and self._begun > self._origin:
            raise ScheduleError("synchronize: mini-batches are under way; call drain() first")
        for index, module in enumerate(self.modules):
            stage = index % len(self._placement.replicas)
            mine = module.state_dict() if stage == self.stage else None
            with watchdog.waiting(lambda: "bringing a stage's state to all ranks"):
                state = self._comm.bcast(mine, root=self._placement.ranks(stage, 0)[0])
            if mine is None:
                module.load_state_dict(state)

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
        self._worker.spans = spans
        try:
            yield lambda: self._timeline(begun, spans)
        finally:
            self._worker.spans = None

    def _timeline(self, begun: float, spans: Sequence[Span]) -> Timeline:
        mine = [replace(span, start=span.start - begun, end=span.end - begun) for span in spans]
        every = [span for part in self._comm.allgather(mine) for span in part]
        work = sum(span.end - span.start for span in every)
        made = self._make(self._microbatches) if self._stream is None else self._stream.schedule
        return Timeline(made, every, self._placement.replicas, work, [stage.in_flight for stage in peak_memory(made)])

    def close(self) -> None:
        """Finish what is under way and free communicators."""
        self.drain()
        self._mailbox.close()


def _chunks_of(name: str, options: Mapping[str, Any]) -> int:
    """How many modules each rank has."""
    family = FAMILIES.get(name)
    if family is None or "chunks" not in family.options:
        return 1
    return schedule(name, 1, 1, **{k: v for k, v in options.items() if k == "chunks"}).chunks


def _state(modules: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of all stages, by a name that says which."""
    return {
        f"{index}.{name}": tensor
        for index, module in enumerate(modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def _described(modules: Sequence[nn.Module]) -> str:
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ScheduleError(f"stage {index} is a {type(module).__name__}, not an nn.Module")
    return "; ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in _state(modules).items())


def _check_separate(modules: Sequence[nn.Module], count: int) -> None:
    """Refuse what is distributed already, and weights that two stages share."""
    homes: dict[int, tuple[int, str]] = {}
    for name, tensor in _state(modules).items():
        index = int(name.partition(".")[0])
        if isinstance(tensor, DistTensor):
            raise ScheduleError(f"stage {index}: {name} is distributed already; pass plain modules, and grids=")
        home, first = homes.setdefault(id(tensor), (index % count, name))
        if home != index % count:
            raise ScheduleError(
                f"{first} and {name} are one tensor, but their stages are on different ranks; give each its own, or "
                "cut the model elsewhere"
            )
