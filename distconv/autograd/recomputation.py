"""``torch.utils.checkpoint`` with distributed tensors: all ranks recompute the same steps at the same time.

Recomputing a block sends messages, so all ranks must start and stop it at the same point. torch starts when the
backward pass first needs a tensor that the block saved, and stops when the last of these is recomputed. But a rank
without elements saves other tensors, or none. Therefore:

1. Start: before the first node, in the order of the backward pass, that computed a distributed result of the block.
2. Stop: after the step in which the last tensor was saved on any rank. Steps are counted before and after
   distributed operators, which are the same on all ranks.
3. To make torch start and stop there, every rank saves one more tensor, an empty one: the marker (``_Marker``).

A selective policy is ignored in such a block, which is recomputed fully: distributed operators write into results of
torch's operators, and compute some of them only once.

The patches declared here are applied when distconv starts. Distributed operators call :func:`count_step`, and the
layers with running statistics :func:`check_statistics_update`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import checkpoint

from distconv.communication import agreement
from distconv.errors import UnsupportedOperation
from distconv.process import patches

active: list[_CheckpointedBlock | _Recomputation] = []
"""Blocks that are being computed, for the first time or again; the innermost one last. Empty outside of checkpoints."""

_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class _Steps:
    """Count of the steps of this rank: before and after each distributed operator, and within some (count_substep)."""

    count = 0
    paused = False
    """True during torch's own bookkeeping, which differs between the two passes. Otherwise steps are counted."""


def count_step(result: Any = None) -> None:
    """Count a step of the active blocks; stop a recomputation that has all tensors it needs.

    Parameters
    ----------
    result : Tensor or sequence of Tensor, optional
        The result of the step.
    """
    if _Steps.paused:
        return
    _Steps.count += 1
    for each in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(each, torch.Tensor):
            register_result(getattr(each, "_local", each))
    again = next((a for a in reversed(active) if isinstance(a, _Recomputation)), None)
    if again is not None:
        # Only the innermost recomputation: an outer one continues when it has ended.
        again.on_step()


def count_substep() -> None:
    """Count a step within an operator, before a part that has effects other than its result."""
    if active:
        count_step()


def check_statistics_update() -> None:
    """Check that running statistics may be updated; call it before each update.

    Raises
    ------
    UnsupportedOperation
        If they would be updated a different number of times than in a single process.
    """
    if any(isinstance(each, _Recomputation) and each.record.running for each in active):
        raise UnsupportedOperation(
            "running statistics in a block of torch.utils.checkpoint that computes a gradient would be updated a "
            "different number of times than in one process. Compute the gradient outside of the block, or checkpoint "
            "only layers without running statistics"
        )


def is_in_early_stopping_block() -> bool:
    """Return True in a block whose recomputation stops at the last tensor that is needed."""
    frames = (each.frame if isinstance(each, _CheckpointedBlock) else each.frame() for each in active)
    return any(frame.early_stop for frame in frames if frame is not None)


def register_result(block: torch.Tensor, world: Any = None) -> None:
    """Register a distributed result of the innermost block.

    Parameters
    ----------
    block : Tensor
        This rank's block of the result.
    world : MPI.Intracomm, optional
        The ranks that computed it.
    """
    innermost = active[-1]
    if isinstance(innermost, _CheckpointedBlock):
        innermost.register_node(block.grad_fn, world)


def _without_steps(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return torch's hook such that no steps are counted in it."""

    def call(x: Any) -> Any:
        before, _Steps.paused = _Steps.paused, True
        try:
            return hook(x)
        finally:
            _Steps.paused = before

    return call


@dataclass
class _Marker:
    """An empty tensor that all ranks save in a block, to mark where its recomputation stops."""

    step: int
    """The step after which it stops, counted from the first one of the block."""
    saved: Any
    """What torch's hook returned for the tensor."""
    is_agreed: bool = False
    """True if ``step`` is the maximum over all ranks. Otherwise it is that of this rank."""


@dataclass
class _Record:
    """Record of the first computation of a block. torch's frame refers to it, and never the reverse (no cycles)."""

    world: Any = None
    """The ranks that compute the block, if there are several."""
    running: bool = True
    """True during the first computation. Otherwise it has ended."""
    first_step: int = 0
    """Count of steps at which the first computation began; ``last_saved`` and the markers count from it."""
    last_saved: int = -1
    """The last step in which this rank saved a tensor."""
    marks: list[_Marker] = field(default_factory=list)
    """Markers in the order in which they were saved, the same number on all ranks."""

    def mark(self, save: Callable[[torch.Tensor], Any]) -> None:
        """Save a marker, as all ranks do."""
        if self.world is not None:
            self.marks.append(_Marker(self.last_saved, save(torch.empty(0))))

    def agree(self) -> None:
        """Move the markers to the step in which the last rank saved a tensor. Collective: call on every rank."""
        for mark in self.marks:
            if not mark.is_agreed:
                mark.step, mark.is_agreed = agreement.allreduce_max(self.world, mark.step, "recomputation"), True


class _CheckpointedBlock(checkpoint._checkpoint_hook):
    """The first computation of a block: torch's hook that saves its tensors, and later unpacks them."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        self.frame = frame
        self.record = record = frame.record = _Record()
        self.save = save = _without_steps(self.pack_hook)
        self._first_node = 0

        def save_and_record(x: torch.Tensor) -> Any:
            # Counted from the beginning of the block, so that the numbers of both computations agree.
            record.last_saved = _Steps.count - record.first_step
            return save(x)

        self.pack_hook = save_and_record

    def __enter__(self) -> None:
        self.record.first_step, self._first_node = _Steps.count, torch._C._autograd._get_sequence_nr()
        active.append(self)
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        active.remove(self)
        self.record.running = False
        # By this function, which does not record the marker as a tensor of the block.
        self.record.mark(self.save)

    def register_node(self, node: Any, world: Any) -> None:
        """Register the node that computed a distributed result: before it runs, the block is recomputed."""
        if self.record.world is None and world is not None and world.size > 1:
            self.record.world = world
        # Only nodes of this block. An argument may have been computed before it.
        if node is not None and node._sequence_nr() >= self._first_node:
            node.register_prehook(_RecomputeBeforeNode(self))


class _RecomputeBeforeNode:
    """Hook of a node that recomputes the block before the node runs.

    Drops the block when the tensors of the node are freed.
    """

    def __init__(self, block: _CheckpointedBlock) -> None:
        self._block: _CheckpointedBlock | None = block

    def __call__(self, gradients: Any) -> None:
        if self._block is not None:
            self._recompute(self._block)
        # With retain_graph=True the graph runs again, and the block is recomputed again.
        if not _keeps_graph():
            self._block = None

    @staticmethod
    def _recompute(block: _CheckpointedBlock) -> None:
        group = getattr(torch._C, "_get_graph_exec_group", lambda: None)()
        task = torch._C._current_graph_task_id() if group is None else group
        if not block.frame.is_recomputed[task]:
            if block.record.running:
                # A gradient that is taken within the block needs the tensors saved so far.
                block.record.mark(block.save)
            if block.record.marks:
                block.unpack_hook(block.record.marks[-1].saved)


class _Recomputation(checkpoint._recomputation_hook):
    """A recomputation of a block: torch's hook that takes its tensors."""

    def __init__(self, frame: Any, task: Any) -> None:
        super().__init__(frame, task)
        self.pack_hook = _without_steps(self.pack_hook)
        self.frame, self.record = frame, frame().record
        self._first_step = 0
        self._marks: list[_Marker] = []

    def __enter__(self) -> None:
        _check_inputs(self.frame())
        self.record.agree()
        self._first_step, self._marks = _Steps.count, [*self.record.marks]
        active.append(self)
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        active.remove(self)
        # If a gradient is being taken within the block, its own steps continue where they were.
        reached, _Steps.count = _Steps.count - self._first_step, self._first_step
        if error[0] is None:
            self._save_marks(reached, everything=True)

    def on_step(self) -> None:
        """Save the markers that were passed. At the last one torch raises an exception, if it stops early."""
        self._save_marks(_Steps.count - self._first_step)

    def _save_marks(self, reached: int, everything: bool = False) -> None:
        # After the step, not before it: the tensor that is needed last may be saved at the end of the step.
        while self._marks and (everything or reached > self._marks[0].step):
            del self._marks[0]
            self.pack_hook(torch.empty(0))


def _with_versions(save: Callable[..., None]) -> Callable[..., None]:
    """Return torch's ``save_inputs``, extended: torch does not notice in-place changes of the block of an input."""

    def call(frame: Any, *inputs: Any) -> None:
        blocks = (each._local for each in inputs if hasattr(each, "_local"))
        # A detached tensor shares the version counter, and keeps no graph.
        frame.versions = [(block.detach(), block._version) for block in blocks if not block.is_inference()]
        save(frame, *inputs)

    return call


def _check_inputs(frame: Any) -> None:
    """Raise torch's RuntimeError if an input of a block was changed in place since the first computation."""
    for block, version in getattr(frame, "versions", ()):
        if block._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input of a block of torch.utils.checkpoint is at version {block._version}; expected version "
                f"{version} instead"
            )


def _ignore_policy(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return the dispatch of a selective policy such that it computes everything in distributed blocks."""

    def call(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # On one rank, or without distributed tensors, the policy applies.
        if active and active[-1].record.world is not None:
            return func(*args, **(kwargs or {}))
        return dispatch(mode, func, types, args, kwargs)

    return call


_REASON = "a recomputation must send the same messages on all ranks"
patches.declare(checkpoint, "_checkpoint_hook", _CheckpointedBlock, _REASON)
patches.declare(checkpoint, "_recomputation_hook", _Recomputation, _REASON)
if hasattr(checkpoint._CheckpointFrame, "save_inputs"):  # older versions of torch do not check
    _save = checkpoint._CheckpointFrame.save_inputs
    patches.declare(checkpoint._CheckpointFrame, "save_inputs", _with_versions(_save), _REASON)
for _mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
    patches.declare(_mode, "__torch_dispatch__", _ignore_policy(_mode.__torch_dispatch__), _REASON)
