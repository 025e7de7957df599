"""``SerialPipeline``: pipelined training without ranks, for any split points, schedule and weight policy.

It does not use the schedules: a formula gives the weights of each pass, so that tests can compare the runtime with it.
With N stages and a_k mini-batches in flight on stage k = 0..N-1, stage k has made max(0, m - a_k + 1) updates at the
forward of mini-batch m, and m updates at its backward. The policies "newest" and "recompute" use these versions; the
others replace one or both of them.

Source: Zhang, Abdelrahman 2021 (stale weights), 5 (the simulated implementation).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distconv.pipeline.schedules.actions import ScheduleError, Weights
from distconv.pipeline.schedules.registry import FAMILIES
from distconv.pipeline.stage.rng import seed_generators
from distconv.pipeline.stage.stage_state import find_shared
from distconv.pipeline.stage.structures import (
    Boundary,
    call_arguments,
    count_samples,
    flatten,
    split_samples,
)

from .serial_stage import Gradients, Run, SerialStage

IN_FLIGHT: dict[str, Callable[[int, int], int]] = {
    "pipedream": lambda stages, stage: stages - stage,
    "spectrain": lambda stages, stage: stages - stage,
    "stale": lambda stages, stage: 2 * (stages - 1 - stage) + 1,
}
"""Mini-batches in flight, a_k, of the asynchronous schedules, which update after each mini-batch."""
SYNCHRONOUS = tuple(
    name for name, family in FAMILIES.items() if family.weights is Weights.SYNCHRONOUS and not family.concurrent
)
"""Schedules that differ in time alone: one update with the gradient of the full mini-batch."""
WEIGHTS = ("newest", "stash", "recompute", "predict")
DEFAULT_WEIGHTS = {name: FAMILIES[name].weights.value for name in IN_FLIGHT}


class SerialPipeline:
    """Pipelined training in one process, one pass after the other.

    Source: Zhang, Abdelrahman 2021 (stale weights), 4 and 5.

    Parameters
    ----------
    stages : sequence of Module
        Stages in order, as :func:`distconv.pipeline.split` makes them.
    loss : callable
        ``loss(output, target)`` returns the mean over samples. It belongs to the last stage.
    optimizer : callable
        Makes a torch optimizer of the parameters of each stage that has any.
    schedule : str
        Name of a schedule.
    microbatches : int
        Micro-batches of a mini-batch, for synchronous schedules.
    weights : str, optional
        Weights of a backward pass. Synchronous schedules accept "recompute" or None. Asynchronous ones accept:

        - "newest": activations of its forward, and the newest weights (stale weights, 4.1). Weights that forward itself
          copies (autocast, weight norm) count as activations.
        - "stash": the weights of its forward (PipeDream).
        - "recompute": a second forward from the stage's input with the newest weights and the same random numbers.
          Buffers (running statistics) do not change again.
        - "predict": both passes use weights extrapolated by the last update to version m + floor(k / 2) (SpecTrain).
    vertical_sync : bool
        With "stash", True to use on all stages the version with which the first stage began the mini-batch. Otherwise
        each stage uses its own.

    Attributes
    ----------
    losses : list of tuple
        Mini-batches, counted from 0, and their losses.
    optimizers : list
        Optimizer of each stage, or None.

    Raises
    ------
    ScheduleError
        If an argument is invalid.

    Notes
    -----
    Random numbers are those of ``seed_generators`` for torch's seed at construction, the mini-batch, the micro-batch
    and the stage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss: Callable[[Any, Any], Tensor],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        schedule: str = "stale",
        microbatches: int = 1,
        *,
        weights: str | None = None,
        vertical_sync: bool = False,
    ) -> None:
        self._plan = _plan(schedule, microbatches, weights, vertical_sync)
        self._loss = loss
        self._seed = torch.initial_seed()
        if self._plan.schedule in IN_FLIGHT and find_shared(stages, len(stages)):
            raise ScheduleError(f"schedule={schedule!r}: stages share parameters; use a synchronous schedule")
        self._stages: list[SerialStage] = []
        for index, module in enumerate(stages):
            # A parameter that several stages use belongs to the first of them.
            earlier = {id(parameter) for stage in self._stages for parameter in stage.parameters}
            self._stages.append(SerialStage(index, module, optimizer, earlier))
        self.optimizers = [stage.optimizer for stage in self._stages]
        self.losses: list[tuple[int, float]] = []
        # Mini-batches begun, and how many of them had begun when the pipeline was last empty (_origin). A flight is the
        # number of a mini-batch since then, or of a micro-batch of a synchronous schedule.
        self._begun = 0
        self._unreported: deque[tuple[int, Tensor]] = deque()  # mini-batches and losses, not in losses yet
        self._gradients: dict[tuple[int, int], Gradients] = {}  # by (stage, flight), of the outputs
        self._restart()

    def step(self, x: Any, target: Any) -> float | None:
        """Train with one mini-batch.

        Afterwards ``.grad`` holds the gradients of the last update of each stage.

        Parameters
        ----------
        x, target : object
            Samples and targets, as in :meth:`Pipeline.step`. The samples receive no gradient.

        Returns
        -------
        float or None
            Loss of the mini-batch. With asynchronous schedules, the loss of the mini-batch whose last update was made;
            None if there is none yet.
        """
        if self._plan.schedule in SYNCHRONOUS:
            self._synchronous_step(x, target)
        else:
            self._asynchronous_step(x, target)
        self._begun += 1
        # Stage 0 is the last to update for a mini-batch, in_flight[0] - 1 steps after its forward.
        if self._begun - self._origin < self._in_flight[0]:
            return None
        return self._report()

    def drain(self) -> None:
        """Run the outstanding backward passes and updates, so that the next mini-batch finds an empty pipeline."""
        # The last stage first, since its backward passes give the others their gradients. Within a stage in the order
        # of the mini-batches, as in the pipeline.
        for stage in reversed(self._stages):
            for minibatch in sorted(stage.flights):
                self._backward_and_update(stage, minibatch)
        while self._unreported:
            self._report()
        self._restart()

    def switch(
        self, schedule: str, microbatches: int = 1, weights: str | None = None, vertical_sync: bool = False
    ) -> None:
        """Drain, and continue with another schedule.

        Source: Zhang, Abdelrahman 2021 (stale weights), 4.2 (hybrid training).

        Parameters
        ----------
        schedule, microbatches, weights, vertical_sync
            As in :class:`SerialPipeline`.
        """
        plan = _plan(schedule, microbatches, weights, vertical_sync)  # before drain(): an invalid call has no effect
        self.drain()
        self._plan = plan
        self._restart()

    def _restart(self) -> None:
        count = len(self._stages)
        in_flight = IN_FLIGHT.get(self._plan.schedule)
        self._in_flight = [in_flight(count, index) if in_flight else 1 for index in range(count)]
        self._origin = self._begun
        for stage in self._stages:
            stage.version = 0
            stage.copies.clear()

    def _report(self) -> float:
        minibatch, loss = self._unreported.popleft()
        self.losses.append((minibatch, float(loss)))
        return self.losses[-1][1]

    def _synchronous_step(self, x: Any, target: Any) -> None:
        for stage in self._stages:
            stage.clear_gradients()
        samples = count_samples("step", x=x, target=target)
        count = min(self._plan.microbatches, samples)
        total = 0.0
        for index, (piece, its_target) in enumerate(
            zip(split_samples(x, count), split_samples(target, count), strict=True)
        ):
            share = count_samples("step", x=piece) / samples
            total += float(self._forward(index, piece, its_target, index, share)) * share
            for stage in reversed(self._stages):
                self._backward(stage, index)
        for stage in self._stages:
            if stage.optimizer is not None:
                stage.optimizer.step()
        self._unreported.append((self._begun, torch.tensor(total, dtype=torch.float64)))

    def _asynchronous_step(self, x: Any, target: Any) -> None:
        minibatch = self._begun - self._origin
        self._unreported.append((self._begun, self._forward(minibatch, x, target)))
        for stage in reversed(self._stages):
            finished = minibatch - self._in_flight[stage.index] + 1
            if finished >= 0:
                self._backward_and_update(stage, finished)

    def _forward(self, flight: int, x: Any, target: Any, microbatch: int = 0, share: float = 1.0) -> Tensor:
        """Run the forward pass of all stages, on which ``flight`` is then in flight, and return the loss.

        The gradient of the loss starts at ``share``, the fraction of the mini-batch's samples.
        """
        values = flatten(x, "x")
        for stage in self._stages:
            run = self._run(stage, target, self._begun, microbatch)
            weights = stage.weights_of(self._version(stage, flight))
            values = stage.forward(flight, values, run, weights, keep=self._plan.weights != "recompute")
        loss: Tensor = values.tensors[0].detach()
        self._gradients[len(self._stages) - 1, flight] = (torch.full_like(loss, share),)
        return loss

    def _run(self, stage: SerialStage, target: Any, minibatch: int, microbatch: int) -> Run:
        """Return the forward pass of a stage; with the same weights it gives the same result in each call."""

        def run(inputs: Boundary) -> Boundary:
            devices = {tensor.device for tensor in inputs.tensors if tensor.is_cuda}
            with seed_generators(self._seed, minibatch, microbatch, stage.index, tuple(devices)):
                args, kwargs = call_arguments(stage.module, inputs.value())
                outputs = stage.module(*args, **kwargs)
                if stage is self._stages[-1]:
                    return Boundary([self._loss(outputs, target)])
            return flatten(outputs, "the output of a stage")

        return run

    def _backward(self, stage: SerialStage, flight: int) -> None:
        weights = stage.weights_of(self._version(stage, flight))
        gradients = stage.backward(flight, self._gradients.pop((stage.index, flight)), weights)
        if stage.index > 0:
            self._gradients[stage.index - 1, flight] = gradients

    def _backward_and_update(self, stage: SerialStage, minibatch: int) -> None:
        stage.clear_gradients()
        self._backward(stage, minibatch)
        # Passes to come need old versions with "stash" alone. "predict" extrapolates from the version before this
        # update.
        needed_from = {"stash": self._version(stage, minibatch + 1), "predict": minibatch}
        stage.update(needed_from.get(self._plan.weights, minibatch + 1))

    def _version(self, stage: SerialStage, minibatch: int) -> int:
        """Return the version of the weights that a pass over ``minibatch`` uses now."""
        if self._plan.weights == "stash":
            first_or_own = 0 if self._plan.vertical_sync else stage.index
            return max(0, minibatch - self._in_flight[first_or_own] + 1)
        if self._plan.weights == "predict":
            return minibatch + stage.index // 2
        return stage.version


@dataclass(frozen=True)
class _Plan:
    schedule: str
    microbatches: int
    weights: str
    vertical_sync: bool


def _plan(schedule: str, microbatches: int, weights: str | None, vertical_sync: bool) -> _Plan:
    """Return the checked arguments, with defaults."""
    if schedule not in SYNCHRONOUS and schedule not in IN_FLIGHT:
        raise ScheduleError(f"schedule={schedule!r}: choose from {', '.join((*SYNCHRONOUS, *IN_FLIGHT))}")
    if weights is not None and weights not in WEIGHTS:
        raise ScheduleError(f"weights={weights!r}: choose from {', '.join(WEIGHTS)}")
    if schedule in SYNCHRONOUS and weights not in (None, "recompute"):
        raise ScheduleError(
            f"weights={weights!r}: {schedule} has one version of the weights; pass 'recompute', or leave it out"
        )
    if microbatches < 1 or (schedule in IN_FLIGHT and microbatches > 1):
        most = "1: it updates after every mini-batch" if schedule in IN_FLIGHT else "1 or more"
        raise ScheduleError(f"microbatches={microbatches}: {schedule} takes {most}")
    weights = weights or DEFAULT_WEIGHTS.get(schedule, "newest")
    if vertical_sync and weights != "stash":
        raise ScheduleError(f"vertical_sync requires weights='stash', which keeps old versions (found {weights!r})")
    return _Plan(schedule, microbatches, weights, vertical_sync)
