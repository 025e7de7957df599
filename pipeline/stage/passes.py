"""Forward and backward passes of one rank: its chunks of the model, and the state of each micro-batch in flight.

The :class:`.Executor` calls the passes, in the order of a schedule, and sends and receives the boundary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from distconv.distribution import default_axes
from distconv.errors import PipelineError
from distconv.grid import ProcessGrid
from distconv.pipeline.schedules.actions import Action, Schedule, Weights
from distconv.pipeline.stage.resharding import local_block, to_boundary
from distconv.placement import scatter
from distconv.tensor import DistTensor

from .buffers import BufferSnapshot, check_unchanged
from .rng import seed_generators
from .running_statistics import RunningStatistics
from .split_backward import WeightBackward, backward_of_inputs
from .stage_inputs import Minibatch, StageInput
from .structures import Boundary, call_arguments, flatten
from .weight_versions import WeightVersions

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Microbatch:
    """Micro-batch of a mini-batch.

    Attributes
    ----------
    x, target : object
        Samples and targets: tensors (N, ...), or nested values of them.
    share : float
        Fraction of the mini-batch's samples, by which the loss is weighted.
    minibatch : Minibatch
    number : int
        Number in the mini-batch.
    """

    x: Any
    target: Any
    share: float
    minibatch: Minibatch
    number: int


@dataclass
class _Pass:
    """State of a forward pass until the last gradient of its micro-batch.

    ``structure`` is that around the inputs. ``outputs`` holds the autograd graph; it is empty if the pass will be
    repeated. ``half`` is the part of the backward pass that waits for W. ``buffers`` has the values before a pass that
    will be repeated.
    """

    inputs: list[StageInput]
    structure: Any
    outputs: list[torch.Tensor] = field(default_factory=list)
    half: WeightBackward | None = None
    buffers: BufferSnapshot | None = None


class Passes:
    """Passes of one rank's chunks, and the micro-batches in flight on them.

    Parameters
    ----------
    modules : sequence of Module
        Chunks of this rank.
    grid : ProcessGrid or None
        Grid on which tensors enter and leave the stage; None for one rank.
    loss : callable
    seed : int
        Seed of all random numbers.
    replicated : bool
        True if other ranks have the same stage for other micro-batches. Otherwise False.
    deferred : bool
        True if batch norm records the statistics of the full mini-batch. Otherwise of each micro-batch.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        grid: ProcessGrid | None,
        loss: Loss,
        seed: int,
        *,
        replicated: bool,
        deferred: bool,
    ) -> None:
        self.modules = list(modules)
        self.statistics = RunningStatistics(modules)
        self._grid, self._loss, self._seed = grid, loss, seed
        self._replicated, self._deferred = replicated, deferred
        self._leaves = [local_block(p) for module in modules for p in module.parameters()]

    def begin(self, schedule: Schedule) -> None:
        """Start with nothing in flight; the next passes are those of ``schedule`` or a longer one of its kind."""
        self.schedule = schedule
        self.weights = WeightVersions(list(dict.fromkeys(self._leaves)))
        # These policies keep copies of parameters: a copy of one would not be a view of the copy of another.
        if schedule.weights in (Weights.STASH, Weights.PREDICT):
            self.weights.check_separate()
        self._states: dict[tuple[int | None, int], _Pass] = {}

    @property
    def defers_statistics(self) -> bool:
        """True if running statistics are updated with the weights. Otherwise by each pass."""
        return self.merges_statistics or self._replicated

    @property
    def merges_statistics(self) -> bool:
        """True if the statistics of several micro-batches are merged. Otherwise they are used one by one."""
        return self._deferred and not self.schedule.asynchronous

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, action: Action, feed: Microbatch, received: Boundary | None) -> Boundary:
        """Run a chunk's forward pass.

        Parameters
        ----------
        action : Action
        feed : Microbatch
            Input of the first chunk, and target of the last one.
        received : Boundary or None
            Result of the chunk before; None for the first chunk.

        Returns
        -------
        Boundary
            Outputs of the chunk; for the last chunk the loss.
        """
        state = self._begin_pass(feed, received)
        if self.schedule.weights is Weights.RECOMPUTE:
            state.buffers = BufferSnapshot([self.modules[action.chunk]])
            # Copies, since the second run needs the inputs unchanged.
            copies = [entry.value.detach().clone() for entry in state.inputs]
            with torch.no_grad():
                outputs = self._run(action, feed, Boundary(copies, state.structure))
        else:
            outputs = self._run(action, feed, self._enter_inputs(state))
            state.outputs = outputs.tensors
        self._states[action.microbatch, action.chunk] = state
        return outputs

    @torch.no_grad()
    def predict(self, action: Action, feed: Microbatch, received: Boundary | None) -> Boundary:
        """Run a chunk without autograd; the outputs of the last chunk are those of the model.

        Parameters
        ----------
        action : Action
        feed : Microbatch
            Input of the first chunk.
        received : Boundary or None
            Result of the chunk before; None for the first chunk.

        Returns
        -------
        Boundary
        """
        return self._to_boundary(self._call(action.chunk, self._enter_inputs(self._begin_pass(feed, received))))

    def _begin_pass(self, feed: Microbatch, received: Boundary | None) -> _Pass:
        if received is not None:
            return _Pass([StageInput(tensor) for tensor in received.tensors], received.structure)
        tensors, structure = flatten(feed.x, "x")
        if self._grid is not None:
            tensors = [scatter(tensor, self._grid) for tensor in tensors]
        return _Pass([StageInput(tensor, first=True) for tensor in tensors], structure)

    @staticmethod
    def _enter_inputs(state: _Pass) -> Boundary:
        return Boundary([entry.enter() for entry in state.inputs], state.structure)

    def _call(self, chunk: int, inputs: Boundary) -> Any:
        args, kwargs = call_arguments(self.modules[chunk], inputs.value())
        return self.modules[chunk](*args, **kwargs)

    def _to_boundary(self, value: Any) -> Boundary:
        tensors, structure = flatten(value, "the output of a stage")
        return Boundary([to_boundary(tensor, self._grid) for tensor in tensors], structure)

    def _run(self, action: Action, feed: Microbatch, inputs: Boundary, is_repeated: bool = False) -> Boundary:
        # Position of the stage in the model, which does not depend on the schedule.
        part = action.chunk * len(self.schedule.stages) + action.stage
        devices = {local_block(tensor).device for tensor in inputs.tensors if tensor.is_cuda}
        with ExitStack() as stack:
            stack.enter_context(self.weights.bind(action.version))
            stack.enter_context(seed_generators(self._seed, feed.minibatch.step, feed.number, part, tuple(devices)))
            # With one version of the weights, autograd saves them itself, and checks that they do not change.
            if self.schedule.asynchronous:
                stack.enter_context(self.weights.save_notes())
            # Replicas see other micro-batches: only the statistics of batch norm can be combined.
            if self._replicated and not is_repeated:
                stack.enter_context(check_unchanged(self.modules[action.chunk]))
            if self.defers_statistics and not is_repeated:
                assert action.microbatch is not None
                stack.enter_context(self.statistics.record_statistics(action.microbatch))
            value = self._call(action.chunk, inputs)
            if part == len(self.schedule.stages) * self.schedule.chunks - 1:
                return Boundary([self._compute_loss(value, feed.target)])
            return self._to_boundary(value)

    def _compute_loss(self, values: Any, target: Any) -> torch.Tensor:
        tensors, structure = flatten(target, "target")
        if self._grid is not None:
            # The last layer may be on another grid than the first.
            found = (leaf.grid for leaf in tree_leaves(values) if isinstance(leaf, DistTensor))
            grid = next(found, self._grid)
            tensors = [scatter(tensor, grid, _target_dims(values, tensor)) for tensor in tensors]
        # Copies: a loss that changes the target in place would change the caller's tensor, on some ranks only.
        loss = self._loss(values, Boundary([tensor.clone() for tensor in tensors], structure).value())
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            described = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"the loss must be a tensor of one element, the mean over samples, not {described}")
        # Every rank of the stage reports the same loss and starts the backward pass from it.
        return loss.replicated() if isinstance(loss, DistTensor) else loss

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, action: Action, feed: Microbatch, received: Boundary | None, full: bool) -> Boundary:
        """Run a chunk's backward pass; gradients of its weights are accumulated.

        Parameters
        ----------
        action : Action
        feed : Microbatch
        received : Boundary or None
            Gradients of the outputs; None for the last chunk, which begins with the loss.
        full : bool
            True to compute all gradients. Otherwise those of weights may wait for :meth:`weight`.

        Returns
        -------
        Boundary
            Gradients of the chunk's inputs; None for inputs without a gradient.

        Raises
        ------
        PipelineError
            If the loss does not require a gradient.
        """
        state = self._states[action.microbatch, action.chunk]
        if state.buffers is not None:
            with state.buffers.rerun():
                state.outputs = self._run(action, feed, self._enter_inputs(state), is_repeated=True).tensors
        if received is None:
            if not local_block(state.outputs[0]).requires_grad:
                raise PipelineError(
                    f"{action}: the loss does not require a gradient, so nothing would be trained. Compute it from the "
                    "output of the last stage by differentiable functions, outside of no_grad, and leave parameters "
                    "trainable"
                )
            # The gradient of the mean over the mini-batch with respect to the mean over this micro-batch.
            received = Boundary([torch.full_like(local_block(state.outputs[0]), feed.share)])
        pairs = [
            (local_block(output), local_block(gradient))
            for output, gradient in zip(state.outputs, received.tensors, strict=True)
            if gradient is not None and local_block(output).requires_grad
        ]
        # Autograd saved the parameters of the forward pass; the policy decides which values they have now.
        with self.weights.bind(action.version):
            self._differentiate(state, pairs, full)
        # Frees the graph of this micro-batch, and with it the activations.
        state.outputs = []
        if not self.schedule.splits_backward:
            self._finish(action)
        return Boundary([entry.gradient for entry in state.inputs])

    def _differentiate(self, state: _Pass, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], full: bool) -> None:
        if not pairs:
            return
        outputs, gradients = zip(*pairs, strict=True)
        # Over a grid, gradient all-reduces overlap with the full backward pass, so it is not split in two.
        if full or self._grid is not None:
            torch.autograd.backward(outputs, gradients)
        else:
            # They are named so that autograd runs as far as the inputs, whose gradients StageInput stores.
            inputs = [entry.value for entry in state.inputs if entry.value.requires_grad]
            state.half = backward_of_inputs(outputs, gradients, inputs, self._leaves)

    def weight(self, action: Action) -> None:
        """Compute the remaining gradients of a backward pass."""
        half = self._states[action.microbatch, action.chunk].half
        if half is not None:
            half.run()
        self._finish(action)

    def _finish(self, action: Action) -> None:
        """Drop the state of a micro-batch on this chunk after its last gradient."""
        del self._states[action.microbatch, action.chunk]
        self.weights.release(action.microbatch)


def _target_dims(output: Any, target: torch.Tensor) -> tuple[str | None, ...]:
    """Return the axes of a target.

    They are those of an output with as many dimensions, or of an output with an additional class dimension (label
    maps).
    """
    dims = output.dim() if isinstance(output, torch.Tensor) else target.dim()
    axes = default_axes(None, dims)
    if target.dim() == dims - 1:
        return (*axes[:1], *axes[2:])
    return default_axes(None, target.dim())
