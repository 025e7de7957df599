"""One recorded run of a step, with its results and side effects, which are undone afterwards.

:mod:`.captured` calls :func:`record_run` on every rank at the same time, since the step sends its messages. Replays are
in :mod:`.replay_code` and :mod:`.graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from distconv import recording
from distconv.capture.gradients import SavedGradients, get_gradient
from distconv.capture.guards import ModuleGuard, OptimizerGuard, block_of, is_comparable, is_constant
from distconv.capture.operations import Recording, SlotOrigin
from distconv.capture.python_access import report_accesses
from distconv.capture.recorder import StepRecorder
from distconv.communication import gradient_reduction
from distconv.tensor import DistTensor

_REGISTER = (
    "use tensors and plain values in lists, tuples and dictionaries, or register a dataclass by "
    "torch.export.register_dataclass"
)


@dataclass(frozen=True)
class StepResult:
    """A tensor that the step returns."""

    slot: int
    """Slot of its block."""
    dist: Any
    """Distribution of a DistTensor; None for a plain tensor, as are ``shape`` and ``strides``."""
    shape: Any
    """Global shape."""
    strides: Any
    """Global strides, as the DistTensor stores them."""

    def wrap(self, block: torch.Tensor) -> torch.Tensor:
        """Return the tensor with this block: a DistTensor, or ``block`` itself."""
        return block if self.dist is None else DistTensor(block, self.dist, self.shape, self.strides)


@dataclass(eq=False)
class CaptureRun:
    """A recording, with the results and side effects of the step.

    Leaves of autograd have numbers: their indices in ``before.leaves``.
    """

    recording: Recording
    results: list[Any]
    """Leaves of the tree of results, with a :class:`StepResult` in place of each tensor."""
    spec: TreeSpec
    """Structure of the tree of results."""
    arguments: dict[int, int]
    """Index of the argument, by number of each leaf that is an argument."""
    gradients: list[tuple[int, int | None]]
    """Numbers of leaves whose ``grad`` is another tensor after the step, and its slot; None if it has no gradient."""
    unsynced: list[tuple[torch.Tensor, int, Any]]
    """Contributions that ``no_sync`` keeps: leaf, slot, and the communicator over which they are to be summed."""
    before: SavedGradients
    """Leaves, and their gradients before the step."""
    generators: list[torch.Generator]
    """Random generators that the step uses."""
    modules: list[torch.nn.Module] = field(default_factory=list)
    """Modules that were called."""
    optimizers: OptimizerGuard = field(default_factory=OptimizerGuard)
    """Optimizers that took a step."""

    def outputs(self) -> list[int]:
        """Return the slots of the outputs: results, then changed gradients, then kept contributions."""
        results = [each.slot for each in self.results if isinstance(each, StepResult)]
        return [
            *results,
            *(slot for _, slot in self.gradients if slot is not None),
            *(slot for _, slot, _ in self.unsynced),
        ]

    def gradient_slots(self) -> dict[int, int]:
        """Return the index in ``before.values`` of each gradient and kept contribution that has a slot, by slot."""
        numbers = {id(value): n for n, value in enumerate(self.before.values) if value is not None}
        slots = enumerate(self.recording.slots)
        return {
            n: numbers[id(slot.tensor)] for n, slot in slots if slot.tensor is not None and id(slot.tensor) in numbers
        }

    def existing_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that existed before the step, other than gradients."""
        gradients, slots = self.gradient_slots(), enumerate(self.recording.slots)
        return [
            slot.tensor
            for n, slot in slots
            if slot.origin is SlotOrigin.EXISTING and n not in gradients and slot.tensor is not None
        ]

    def leaves(self, blocks: Sequence[Any]) -> list[torch.Tensor]:
        """Return the leaves by number, with those in ``blocks`` in place of the arguments of the recorded run."""
        return [
            blocks[self.arguments[number]] if number in self.arguments else leaf
            for number, leaf in enumerate(self.before.leaves)
        ]


def record_run(function: Callable[..., Any], args: Sequence[Any]) -> CaptureRun:
    """Run a step once and record it. Memory, gradients, random generators and optimizers are restored.

    Collective, since the step sends its messages: call on every rank.

    Parameters
    ----------
    function : callable
        The step.
    args : sequence
        Its arguments. The step gets copies of strided tensors that require no gradient.

    Returns
    -------
    CaptureRun
        The recording; ``recording.unsupported`` lists unsupported operations.
    """
    gradients = SavedGradients()
    recorder = StepRecorder(gradients)
    optimizers = OptimizerGuard()
    modules: dict[int, torch.nn.Module] = {}
    guards: list[ModuleGuard] = []
    leaves, spec = tree_flatten(tuple(args))
    for leaf in leaves:
        if not is_comparable(leaf):
            recorder.mark_unsupported(f"an argument has type {type(leaf).__name__}: {_REGISTER}", "the step")
    # By id: an argument that is passed twice remains one tensor.
    copies: dict[int, Any] = {}
    copied_args = tree_map(lambda leaf: copies.setdefault(id(leaf), _copy_argument(leaf)), tuple(args))
    blocks = [block_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in tree_flatten(copied_args)[0]]
    for block in blocks:
        recorder.add_input(block)

    def note(module: torch.nn.Module, _: Any) -> None:
        # At the first call of the module, before the step can change its members or its gradients.
        if id(module) not in modules:
            modules[id(module)] = module
            guards.append(ModuleGuard([module]))
            for parameter in module._parameters.values():
                if parameter is not None:
                    gradients.add(block_of(parameter))

    hook = register_module_forward_pre_hook(note)
    torch.clear_autocast_cache()  # Casts in the cache belong to the autograd graph of another run.
    try:
        with (
            report_accesses(recorder, gradients),
            optimizers.observe_steps(lambda reason: recorder.mark_unsupported(reason, "the step")),
        ):
            recording.active = recorder
            try:
                # Otherwise the backward pass of a GPU runs in its own thread, which has no frame of the user's script.
                with torch.autograd.set_multithreading_enabled(False), recorder:
                    result = function(*copied_args)
                run = _finish_run(recorder, gradients, result, blocks)
                run.modules, run.optimizers = [*modules.values()], optimizers
            finally:
                recording.active = None
    finally:
        hook.remove()
        recorder.restore()
        gradients.restore()
    change = next(filter(None, (guard.describe_change() for guard in guards)), "")
    if change:
        recorder.mark_unsupported(
            f"{change} after the step. Take one step without dc.capture, or change it outside", "the step"
        )
    after, spec_after = tree_flatten(copied_args)
    if spec_after != spec or any(copies[id(one)] is not other for one, other in zip(leaves, after, strict=True)):
        recorder.mark_unsupported(
            "the step stores a value in an argument, which a replay would not do. Return it instead", "the step"
        )
    return run


def _copy_argument(value: Any) -> Any:
    """Return a copy of an argument, to which nothing else refers, so that the step may change it.

    Tensors that require gradients are leaves of the step, and are returned themselves.
    """
    if not isinstance(value, torch.Tensor) or block_of(value).requires_grad or block_of(value).layout != torch.strided:
        return value
    block = block_of(value)
    # Its elements share memory, so torch rejects writes to it, and a view is enough.
    if 0 in block.stride() and block.numel() > 1:
        copy = block.expand_as(block)
    else:
        copy = torch.empty_strided(block.shape, block.stride(), dtype=block.dtype, device=block.device).copy_(block)
    return DistTensor(copy, value.dist, value.shape, value._strides) if isinstance(value, DistTensor) else copy


def _finish_run(
    recorder: StepRecorder, before: SavedGradients, result: Any, blocks: Sequence[torch.Tensor | None]
) -> CaptureRun:
    def slot_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if not is_constant(value):
                recorder.mark_unsupported(f"a result has type {type(value).__name__}: {_REGISTER}", "the step")
            return value
        block = block_of(value)
        if block.requires_grad and not recorder.ran_backward:
            recorder.mark_unsupported(
                "a result requires a backward pass. Call backward() in the step, or use torch.no_grad()"
            )
        shape = (value.dist, value.shape, value._strides) if isinstance(value, DistTensor) else (None, None, None)
        return StepResult(recorder.slot_of(block), *shape)

    leaves, spec = tree_flatten(result)
    results = [slot_of(leaf) for leaf in leaves]
    gradients: list[tuple[int, int | None]] = []
    # strict=False: the kept contributions follow the gradients of the leaves.
    for number, (leaf, grad) in enumerate(zip(before.leaves, before.values, strict=False)):
        now = get_gradient(leaf)
        # By identity: a gradient that is accumulated in place is a change of memory, which operations repeat.
        if now is not grad:
            gradients.append((number, None if now is None else recorder.slot_of(now)))
    numbers = {id(block): n for n, block in enumerate(blocks) if block is not None}
    arguments = {n: numbers[id(leaf)] for n, leaf in enumerate(before.leaves) if id(leaf) in numbers}
    kept = [(leaf, recorder.slot_of(grad), comm) for leaf, grad, comm in gradient_reduction.unsynced_grads()]
    return CaptureRun(recorder.recording, results, spec, arguments, gradients, kept, before, recorder.generators)


def rebuild_results(run: CaptureRun, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the results of a run with other blocks.

    Parameters
    ----------
    run : CaptureRun
        The run.
    tensors : sequence of Tensor
        One block for each tensor among the results, in the order of ``run.results``.

    Returns
    -------
    object
        A tree like the result of the step.
    """
    blocks = iter(tensors)
    leaves = [each.wrap(next(blocks)) if isinstance(each, StepResult) else each for each in run.results]
    return tree_unflatten(leaves, run.spec)
