"""One recorded run of a step: what it did, and what it left. The run itself changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from distconv import recording
from distconv.capture.entries import Kind, Recording
from distconv.capture.gradients import Gradients, gradient
from distconv.capture.guards import Modules, Optimizers, block_of, is_comparable, is_constant
from distconv.capture.python_access import reported
from distconv.capture.recorder import Recorder
from distconv.communication import gradient_reduction
from distconv.tensor import DistTensor

_REGISTER = (
    "use tensors and plain values in lists, tuples and dictionaries, or register a dataclass by "
    "torch.export.register_dataclass"
)


@dataclass(frozen=True)
class Result:
    """A tensor that the step returns: the slot of its block, and how the block becomes that tensor again."""

    slot: int
    dist: Any
    shape: Any
    strides: Any

    def wrapped(self, block: torch.Tensor) -> torch.Tensor:
        """Return ``block`` as the tensor that users see."""
        return block if self.dist is None else DistTensor(block, self.dist, self.shape, self.strides)


@dataclass(eq=False)
class Run:
    """A recording, and what the step has left."""

    recording: Recording
    results: list[Any]
    """Leaves of what it returned, with a Result in place of each tensor."""
    spec: TreeSpec
    arguments: dict[int, int]
    """By the number of a leaf that is an argument the number of that argument."""
    gradients: list[tuple[int, int | None]]
    """Numbers of leaves whose ``grad`` is another tensor now, and its slot."""
    kept: list[tuple[torch.Tensor, int, Any]]
    """Contributions that no_sync keeps: leaf, slot, and the ranks over which they are to be summed."""
    before: Gradients
    generators: list[torch.Generator]
    modules: list[torch.nn.Module] = field(default_factory=list)
    """Modules that were called."""
    optimizers: Optimizers = field(default_factory=Optimizers)
    """Optimizers that took a step."""

    def outputs(self) -> list[int]:
        """Return the slots of all tensors that it leaves: results, gradients, kept contributions."""
        results = [each.slot for each in self.results if isinstance(each, Result)]
        return [
            *results,
            *(slot for _, slot in self.gradients if slot is not None),
            *(slot for _, slot, _ in self.kept),
        ]

    def gradient_slots(self) -> dict[int, int]:
        """Return slots of gradients and kept contributions from before the step, with their numbers."""
        numbers = {id(value): n for n, value in enumerate(self.before.values) if value is not None}
        slots = enumerate(self.recording.slots)
        return {n: numbers[id(slot.value)] for n, slot in slots if slot.value is not None and id(slot.value) in numbers}

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that existed before the step, other than gradients."""
        gradients, slots = self.gradient_slots(), enumerate(self.recording.slots)
        return [
            slot.value for n, slot in slots if slot.kind is Kind.HELD and n not in gradients and slot.value is not None
        ]

    def leaves(self, blocks: Sequence[Any]) -> list[torch.Tensor]:
        """Return the leaves in the order of their numbers; those that are arguments are taken from ``blocks``."""
        return [
            blocks[self.arguments[number]] if number in self.arguments else leaf
            for number, leaf in enumerate(self.before.leaves)
        ]


def recorded(function: Callable[..., Any], args: Sequence[Any]) -> Run:
    """Run ``function`` once and record it; memory, gradients, generators and optimizers are restored."""
    gradients = Gradients()
    recorder = Recorder(gradients)
    optimizers = Optimizers()
    modules: dict[int, torch.nn.Module] = {}
    guards: list[Modules] = []
    leaves, spec = tree_flatten(tuple(args))
    for leaf in leaves:
        if not is_comparable(leaf):
            recorder.refuse(f"an argument has type {type(leaf).__name__}: {_REGISTER}", "the step")
    copies: dict[int, Any] = {}
    given = tree_map(lambda leaf: copies.setdefault(id(leaf), _example(leaf)), tuple(args))
    blocks = [block_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in tree_flatten(given)[0]]
    for block in blocks:
        recorder.add_input(block)

    def note(module: torch.nn.Module, _: Any) -> None:
        if id(module) not in modules:
            modules[id(module)] = module
            guards.append(Modules([module]))
            for parameter in module._parameters.values():
                if parameter is not None:
                    gradients.add(block_of(parameter))

    hook = register_module_forward_pre_hook(note)
    torch.clear_autocast_cache()  # Casts of another run belong to the graph of that run.
    try:
        with reported(recorder, gradients), optimizers.noted(lambda reason: recorder.refuse(reason, "the step")):
            recording.active = recorder
            try:
                # The backward pass of a GPU has a thread of its own, where no line of the user's is known.
                with torch.autograd.set_multithreading_enabled(False), recorder:
                    result = function(*given)
                run = _run(recorder, gradients, result, blocks)
                run.modules, run.optimizers = [*modules.values()], optimizers
            finally:
                recording.active = None
    finally:
        hook.remove()
        recorder.put_back()
        gradients.put_back()
    change = next(filter(None, (guard.difference() for guard in guards)), "")
    if change:
        recorder.refuse(f"{change} after the step. Take one step without dc.capture, or change it outside", "the step")
    after, spec_after = tree_flatten(given)
    if spec_after != spec or any(copies[id(one)] is not other for one, other in zip(leaves, after, strict=True)):
        recorder.refuse("the step puts something into an argument, which a replay does not: return it", "the step")
    return run


def _example(value: Any) -> Any:
    """Return a copy of an argument, which the step may change, and to which nothing else refers."""
    if not isinstance(value, torch.Tensor) or block_of(value).requires_grad or block_of(value).layout != torch.strided:
        return value
    block = block_of(value)
    if 0 in block.stride() and block.numel() > 1:
        copy = block.expand_as(block)
    else:
        copy = torch.empty_strided(block.shape, block.stride(), dtype=block.dtype, device=block.device).copy_(block)
    return DistTensor(copy, value.dist, value.shape, value._strides) if isinstance(value, DistTensor) else copy


def _run(recorder: Recorder, before: Gradients, result: Any, blocks: Sequence[torch.Tensor | None]) -> Run:
    def slot_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if not is_constant(value):
                recorder.refuse(f"a result has type {type(value).__name__}: {_REGISTER}", "the step")
            return value
        block = block_of(value)
        if block.requires_grad and not recorder.ran_backward:
            recorder.refuse("a result needs a backward pass: call it inside of the step, or use torch.no_grad()")
        shape = (value.dist, value.shape, value._strides) if isinstance(value, DistTensor) else (None, None, None)
        return Result(recorder.slot(block), *shape)

    leaves, spec = tree_flatten(result)
    results = [slot_of(leaf) for leaf in leaves]
    gradients: list[tuple[int, int | None]] = []
    for number, (leaf, grad) in enumerate(zip(before.leaves, before.values, strict=False)):
        now = gradient(leaf)
        if now is not grad:
            gradients.append((number, None if now is None else recorder.slot(now)))
    numbers = {id(block): n for n, block in enumerate(blocks) if block is not None}
    arguments = {n: numbers[id(leaf)] for n, leaf in enumerate(before.leaves) if id(leaf) in numbers}
    kept = [(leaf, recorder.slot(share), comm) for leaf, share, comm in gradient_reduction.unsynced_grads()]
    return Run(recorder.recording, results, spec, arguments, gradients, kept, before, recorder.generators)


def filled(run: Run, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the results of ``run`` with ``tensors`` as their blocks."""
    blocks = iter(tensors)
    leaves = [each.wrapped(next(blocks)) if isinstance(each, Result) else each for each in run.results]
    return tree_unflatten(leaves, run.spec)
