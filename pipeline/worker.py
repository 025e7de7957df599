"""One rank of a pipeline: it does the actions of its list, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from distconv.distribution import default_axes
from distconv.errors import PipelineError
from distconv.grid import ProcessGrid
from distconv.tensor import DistTensor, scatter

from .actions import COMPUTE, Action, Kind, Message, Schedule, Weights
from .boundaries import local, to_boundary
from .entering import entering, gradients_of, leaf
from .halves import WeightHalf, backward_of_inputs
from .mail import Mailbox
from .placement import Place
from .replicas import add_gradients, everyone
from .running_statistics import RunningStatistics
from .seeding import seeded
from .timeline import Span
from .weights import WeightVersions

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Feed:
    """A micro-batch: its samples, and what its loss counts in the mini-batch ``step``; ``number`` within it."""

    x: torch.Tensor
    target: torch.Tensor
    share: float
    step: int
    number: int


@dataclass
class _Pass:
    """What a rank keeps of a forward pass until the last gradient of its micro-batch."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    half: WeightHalf | None = None


class Worker:
    """The chunks of the model that one rank has, and what is on its way through them.

    ``modules``: those chunks in order; ``twins``: the ranks with the same part of the stage's other replicas.
    """

    def __init__(
        self,
        place: Place,
        modules: Sequence[nn.Module],
        grid: ProcessGrid | None,
        mailbox: Mailbox,
        twins: MPI.Intracomm,
        loss: Loss,
        optimizer: torch.optim.Optimizer | None,
        batch_norm: str,
        seed: int,
    ) -> None:
        self.place, self.modules, self.optimizer = place, list(modules), optimizer
        self._grid, self._mailbox, self._twins, self._loss, self._seed = grid, mailbox, twins, loss, seed
        self._leaves = [local(p) for module in modules for p in module.parameters()]
        self._deferred = batch_norm == "deferred"
        self._statistics = RunningStatistics(modules)
        self._clean = False
        self._next: Action | None = None
        self.spans: list[Span] | None = None
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.W: self._weight,
            Kind.SEND: self._send,
            Kind.RECEIVE: self._receive,
            Kind.UPDATE: self._update,
            Kind.STASH: lambda action: self._weights.stash(action.version or 0, action.microbatch),
            Kind.PREDICT: lambda action: self._weights.predict(action.version or 0),
        }

    def begin(self, schedule: Schedule) -> None:
        """An empty pipeline, about to follow ``schedule`` or a longer one of its kind."""
        self._schedule = schedule
        self._weights = WeightVersions(list(dict.fromkeys(self._leaves)))
        if schedule.weights in (Weights.STASH, Weights.PREDICT):
            self._weights.check_separate()
        self._fed: dict[int, Feed] = {}
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._made: dict[Message, list[torch.Tensor | None]] = {}
        self.losses: dict[int, float] = {}
        """Of the micro-batches whose loss has reached this rank."""

    def feed(self, microbatch: int, feed: Feed) -> None:
        """Hand over a micro-batch before its first action."""
        self._fed[microbatch] = feed

    def perform(self, actions: Sequence[Action]) -> None:
        """Do ``actions``.

        Raises
        ------
        PipelineError
            Naming rank, stage, operation and micro-batch, whatever fails in one.
        """
        for action, self._next in zip_longest(actions, actions[1:]):
            try:
                self._arrive(action)
                start = time.perf_counter()
                self._do[action.kind](action)
            except PipelineError:
                raise
            except Exception as error:
                raise PipelineError(f"rank {MPI.COMM_WORLD.rank}, {action}: {type(error).__name__}: {error}") from error
            if self.spans is not None and action.kind in COMPUTE | {Kind.UPDATE}:
                self.spans.append(Span(action, self.place.replica, start, time.perf_counter()))

    # -- messages -----------------------------------------------------------------------------------------------------

    def _receive(self, action: Action) -> None:
        message = self._schedule.carries(action)
        assert message is not None and action.peer is not None
        self._mailbox.post(message, action.peer)

    def _arrive(self, action: Action) -> None:
        """Wait for what ``action`` needs, if it comes from another stage."""
        message = self._schedule.needs(action)
        if message is None or message in self._made:
            return
        peer = self._schedule.receives(message).peer
        assert peer is not None
        what = f"stage {self.place.stage}: {action.kind} of micro-batch {action.microbatch} waiting for stage {peer}"
        values, loss = self._mailbox.take(message, peer, self._fed[message.microbatch].step, what)
        self._made[message] = values
        if message.payload is Kind.B:
            self.losses[message.microbatch] = loss

    def _send(self, action: Action) -> None:
        message = self._schedule.carries(action)
        assert message is not None and action.peer is not None
        loss = self.losses.get(message.microbatch, 0.0)
        step = self._fed[message.microbatch].step
        self._mailbox.send(message, action.peer, step, self._made.pop(message), loss, str(action))

    # -- passes -------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        assert action.microbatch is not None
        message = self._schedule.needs(action)
        feed = self._fed[action.microbatch]
        if message is None:
            inputs = [feed.x if self._grid is None else scatter(feed.x, self._grid)]
        else:
            inputs = [leaf(value) for value in self._made.pop(message) if value is not None]
        kept = _Pass(inputs)
        recomputes = self._schedule.weights is Weights.RECOMPUTE
        versions = [local(value)._version for value in inputs]
        with torch.set_grad_enabled(not recomputes):
            outputs = self._run(action, feed, inputs)
        if recomputes and versions != [local(value)._version for value in inputs]:
            raise PipelineError(
                f"{action}: weights='recompute' needs the stage's input once more, but the stage changes it in place"
            )
        kept.outputs = [] if recomputes else outputs
        self._passes[action.microbatch, action.chunk] = kept
        made = self._schedule.makes(action)
        if made is None:
            self.losses[action.microbatch] = float(outputs[0].detach())
        else:
            self._made[made] = list(outputs)

    def _run(
        self, action: Action, feed: Feed, inputs: Sequence[torch.Tensor], again: bool = False
    ) -> list[torch.Tensor]:
        """The chunk's outputs, the last one's loss."""
        part = action.chunk * len(self._schedule.stages) + action.stage
        devices = {local(value).device for value in inputs if value.is_cuda}
        with ExitStack() as stack:
            stack.enter_context(self._weights.bound(action.version))
            stack.enter_context(seeded(self._seed, feed.step, feed.number, part, tuple(devices)))
            if self._schedule.asynchronous:
                stack.enter_context(self._weights.noted())
            if again or self._collects:
                stack.enter_context(self._statistics.taken(None if again else action.microbatch))
            values = self.modules[action.chunk](*map(entering, inputs))
            if part == len(self._schedule.stages) * self._schedule.chunks - 1:
                return [self._scored(values, feed.target)]
            outputs = list(values) if isinstance(values, (tuple, list)) else [values]
            for value in outputs:
                if not isinstance(value, torch.Tensor):
                    raise TypeError(f"a stage must return tensors, not {type(value).__name__}")
            return [to_boundary(value, self._grid) for value in outputs]

    def _scored(self, values: Any, target: torch.Tensor) -> torch.Tensor:
        if self._grid is not None:
            target = scatter(target, self._grid, _target_dims(values, target))
        loss = self._loss(values, target)
        return loss.replicated() if isinstance(loss, DistTensor) else loss

    @property
    def _collects(self) -> bool:
        return self._merges or self._twins.size > 1

    @property
    def _merges(self) -> bool:
        """Whether a mini-batch has several micro-batches whose statistics are to be those of one."""
        return self._deferred and not self._schedule.asynchronous

    def _backward(self, action: Action) -> None:
        assert action.microbatch is not None
        kept = self._passes[action.microbatch, action.chunk]
        message = self._schedule.needs(action)
        feed = self._fed[action.microbatch]
        self._clear_gradients()
        if self._schedule.weights is Weights.RECOMPUTE:
            kept.outputs = self._run(action, feed, kept.inputs, again=True)
        if message is None:
            gradients: list[torch.Tensor | None] = [torch.full_like(local(kept.outputs[0]), feed.share)]
        else:
            gradients = self._made.pop(message)
        pairs = [
            (local(o), local(g))
            for o, g in zip(kept.outputs, gradients, strict=True)
            if g is not None and local(o).requires_grad
        ]
        with self._weights.bound(action.version), gradients_of(kept.inputs) as found:
            self._differentiate(action, kept, pairs)
        made = self._schedule.makes(action)
        if made is not None:
            self._made[made] = found
        kept.outputs = []
        if not self._schedule.splits_backward:
            self._finish(action)

    def _is_next(self, kind: Kind, action: Action) -> bool:
        then = self._next
        return then is not None and (then.kind, then.microbatch, then.chunk) == (kind, action.microbatch, action.chunk)

    def _differentiate(self, action: Action, kept: _Pass, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if not pairs:
            return
        outputs, gradients = zip(*pairs, strict=True)
        # Over a grid the sums of gradients run behind the whole backward pass, which is not cut in two. Nor is one
        # whose W comes next: nobody waits for its first half.
        if self._schedule.splits_backward and self._grid is None and not self._is_next(Kind.W, action):
            inputs = [value for value in kept.inputs if value.requires_grad]
            kept.half = backward_of_inputs(outputs, gradients, inputs, self._leaves)
        else:
            torch.autograd.backward(outputs, gradients)

    def _weight(self, action: Action) -> None:
        assert action.microbatch is not None
        half = self._passes[action.microbatch, action.chunk].half
        if half is not None:
            half.run()
        self._finish(action)

    def _finish(self, action: Action) -> None:
        """The last gradient of a micro-batch on this chunk is done."""
        assert action.microbatch is not None
        del self._passes[action.microbatch, action.chunk]
        self._weights.release(action.microbatch)

    # -- updates ------------------------------------------------------------------------------------------------------

    def _clear_gradients(self) -> None:
        """Before the first gradient after an update."""
        if not self._clean:
            for module in self.modules:
                module.zero_grad(set_to_none=True)
            self._clean = True

    def _update(self, action: Action) -> None:
        self._clear_gradients()  # of a replica for which there was no micro-batch
        if self._collects:
            records = [self._statistics.records]
            if self._twins.size > 1:
                records = everyone(self._twins, self._statistics.records, str(action))
            self._statistics.commit([record for each in records for record in each], self._merges)
        if self._twins.size > 1:
            for losses in everyone(self._twins, self.losses, str(action)):
                self.losses.update(losses)
            add_gradients(self._twins, self._weights.parameters, self._together(action), str(action))
        self._weights.updating(self._schedule.weights is Weights.PREDICT)
        if self.optimizer is not None:
            self.optimizer.step()
        self._clean = False

    def _together(self, action: Action) -> int:
        """By what the sum of the replicas' gradients is divided: asynchronous ones do a mini-batch each."""
        if action.microbatch is None:
            return 1
        first = action.microbatch // self._twins.size * self._twins.size
        return sum(first + index in self._fed for index in range(self._twins.size))

    def forget(self, before: int) -> None:
        """Drop what concerns the micro-batches before ``before``, which are all done."""
        for known in (self._fed, self.losses):
            for microbatch in [number for number in known if number < before]:
                del known[microbatch]


def _target_dims(output: Any, target: torch.Tensor) -> tuple[str | None, ...]:
    """The axes of a target: those of an output as large, or of one with a channel for each class (label maps)."""
    dims = output.dim() if isinstance(output, torch.Tensor) else target.dim()
    axes = default_axes(None, dims)
    if target.dim() == dims - 1:
        return (*axes[:1], *axes[2:])
    return default_axes(None, target.dim())
