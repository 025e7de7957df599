"""``torch.utils.checkpoint`` with distributed tensors: all ranks recompute a block at one place, and up to one place.

Recomputation sends messages. torch begins it where the backward pass first asks for a tensor that the block saved, and
ends it where the last of them is there again; but a rank without elements saves others, or none. Here it begins before
the first node, in the order of the backward pass, that made any distributed result, and ends behind the step in which
the last tensor was saved on any rank. Steps are the beginnings and ends of distributed operators, and on all ranks the
same. Both places are told to torch by one more tensor, empty, that every rank saves last.

Which operators a selective policy saves is not asked in such a block: distributed operators write into the results of
torch's, and make some only once. The block is recomputed whole.

Importing this module puts that in place.
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

active: list[_Block | _Again] = []
"""Blocks that are being computed, for the first time or again; the innermost last."""

_NOTHING = torch.empty(0)

_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class _Steps:
    count = 0
    paused = False
    """While torch does its own bookkeeping, which it does not do alike in both passes."""


def count_step(result: Any = None) -> None:
    """Count a step of the active blocks, which gave ``result``; ends a recomputation that needs no more."""
    if _Steps.paused:
        return
    _Steps.count += 1
    for each in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(each, torch.Tensor):
            note_result(getattr(each, "_local", each))
    again = next((a for a in reversed(active) if isinstance(a, _Again)), None)
    if again is not None:
        again.stepped()


def count_substep() -> None:
    """A step within an operator: what follows does more than compute its result."""
    if active:
        count_step()


def check_statistics_update() -> None:
    """To be called before running statistics move.

    Raises
    ------
    UnsupportedOperation
        If they would not move as often as in one process.
    """
    if any(isinstance(each, _Again) and each.record.running for each in active):
        raise UnsupportedOperation(
            "running statistics in a block of torch.utils.checkpoint that takes a gradient of its own: they would move "
            "another number of times than in one process; take that gradient outside the block, or checkpoint the "
            "layers without running statistics"
        )


def is_in_early_stopping_block() -> bool:
    """Whether what is being computed will be computed again only as far as it is needed."""
    frames = (each.frame if isinstance(each, _Block) else each.frame() for each in active)
    return any(frame.early_stop for frame in frames if frame is not None)


def note_result(block: torch.Tensor, world: Any = None) -> None:
    """Note the ``block`` of a result that the ranks of ``world`` have together."""
    innermost = active[-1]
    if isinstance(innermost, _Block):
        innermost.made(block.grad_fn, world)


def _unstepped(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        before, _Steps.paused = _Steps.paused, True
        try:
            return hook(x)
        finally:
            _Steps.paused = before

    return call


@dataclass
class _Mark:
    """An empty tensor that all ranks save behind the same step of a block, counted from its first one."""

    step: int
    kept: Any
    """What torch gave for it."""
    agreed: bool = False


@dataclass
class _Record:
    """What is known of a block from its first computation. Torch's frame of the block keeps it, never the reverse."""

    world: Any = None
    """The ranks that compute it together, if there are several."""
    running: bool = True
    first_step: int = 0
    last_saved: int = -1
    """The step in which this rank saved a tensor last."""
    marks: list[_Mark] = field(default_factory=list)

    def mark(self, save: Callable[[torch.Tensor], Any]) -> None:
        """``save`` one more tensor, which all ranks do."""
        if self.world is not None:
            self.marks.append(_Mark(self.last_saved, save(_NOTHING)))

    def agree(self) -> None:
        """Let the marks stand where the last of the ranks had saved what it needs."""
        for mark in self.marks:
            if not mark.agreed:
                mark.step, mark.agreed = agreement.allreduce_max(self.world, mark.step, "recomputation"), True


class _Block(checkpoint._checkpoint_hook):
    """A block that is computed for the first time: what saves its tensors, and later asks for them."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        self.frame = frame
        self.record = record = frame.record = _Record()
        self.save = save = _unstepped(self.pack_hook)
        self._first_node = 0

        def noted(x: torch.Tensor) -> Any:
            record.last_saved = _Steps.count - record.first_step
            return save(x)

        self.pack_hook = noted

    def __enter__(self) -> None:
        self.record.first_step, self._first_node = _Steps.count, torch._C._autograd._get_sequence_nr()
        active.append(self)
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        active.remove(self)
        self.record.running = False
        self.record.mark(self.save)

    def made(self, node: Any, world: Any) -> None:
        """Note ``node``, which made a distributed result."""
        if self.record.world is None and world is not None and world.size > 1:
            self.record.world = world
        if node is not None and node._sequence_nr() >= self._first_node:
            node.register_prehook(_Before(self))


class _Before:
    """Hook of a node: recomputes its block before it runs. Lets go of it when the node's own tensors are freed."""

    def __init__(self, block: _Block) -> None:
        self._block: _Block | None = block

    def __call__(self, gradients: Any) -> None:
        if self._block is not None:
            self._recompute(self._block)
        if not _keeps_graph():
            self._block = None

    @staticmethod
    def _recompute(block: _Block) -> None:
        group = getattr(torch._C, "_get_graph_exec_group", lambda: None)()
        task = torch._C._current_graph_task_id() if group is None else group
        if not block.frame.is_recomputed[task]:
            if block.record.running:
                # A gradient that is taken within the block needs what has been saved so far.
                block.record.mark(block.save)
            if block.record.marks:
                block.unpack_hook(block.record.marks[-1].kept)


class _Again(checkpoint._recomputation_hook):
    """A block that is computed again: what takes its tensors."""

    def __init__(self, frame: Any, task: Any) -> None:
        super().__init__(frame, task)
        self.pack_hook = _unstepped(self.pack_hook)
        self.frame, self.record = frame, frame().record
        self._first_step = 0
        self._marks: list[_Mark] = []

    def __enter__(self) -> None:
        _check_inputs(self.frame())
        self.record.agree()
        self._first_step, self._marks = _Steps.count, [*self.record.marks]
        active.append(self)
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        active.remove(self)
        # The block's own steps go on where they were, if a gradient is being taken within it.
        reached, _Steps.count = _Steps.count - self._first_step, self._first_step
        if error[0] is None:
            self._save_marks(reached, everything=True)

    def stepped(self) -> None:
        """Save the marks that have been passed; at the last one torch stops, with an exception, if it stops early."""
        self._save_marks(_Steps.count - self._first_step)

    def _save_marks(self, reached: int, everything: bool = False) -> None:
        while self._marks and (everything or reached > self._marks[0].step):
            del self._marks[0]
            self.pack_hook(_NOTHING)


def _keeping_versions(save: Callable[..., None]) -> Callable[..., None]:
    """Torch's frame of a block keeps its inputs, but sees no change in place of their blocks."""

    def call(frame: Any, *inputs: Any) -> None:
        blocks = (each._local for each in inputs if hasattr(each, "_local"))
        frame.versions = [(block.detach(), block._version) for block in blocks if not block.is_inference()]
        save(frame, *inputs)

    return call


def _check_inputs(frame: Any) -> None:
    """Raise torch's RuntimeError if an input of a block has been changed in place since it was computed first."""
    for block, version in getattr(frame, "versions", ()):
        if block._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input of a block of torch.utils.checkpoint is at version {block._version}; expected version "
                f"{version} instead"
            )


def _whole(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    def call(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if active and active[-1].record.world is not None:
            return func(*args, **(kwargs or {}))
        return dispatch(mode, func, types, args, kwargs)

    return call


_AGAIN = "what is computed again must send what was sent, on all ranks"
patches.declare(checkpoint, "_checkpoint_hook", _Block, _AGAIN)
patches.declare(checkpoint, "_recomputation_hook", _Again, _AGAIN)
if hasattr(checkpoint._CheckpointFrame, "save_inputs"):  # not in older torches, which do not look
    _save = checkpoint._CheckpointFrame.save_inputs
    patches.declare(checkpoint._CheckpointFrame, "save_inputs", _keeping_versions(_save), _AGAIN)
for _mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
    patches.declare(_mode, "__torch_dispatch__", _whole(_mode.__torch_dispatch__), _AGAIN)
