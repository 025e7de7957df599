"""One run of a step while it is recorded, and all that it leaves: results, gradients, shares, memory.

A run changes nothing: what it has written to is put back, and so are gradients and random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from distconv import recording
from distconv.capture.entries import Kind, Recording
from distconv.capture.recorder import Recorder
from distconv.capture.state import State, gradient
from distconv.capture.unseen import seen
from distconv.capture.watch.arguments import block_of, identity
from distconv.capture.watch.executed import Executed
from distconv.capture.watch.modules import Modules
from distconv.capture.watch.optimizers import Optimizers
from distconv.capture.watch.places import Place, Places
from distconv.capture.watch.references import References
from distconv.capture.watch.structures import flattened, mapped
from distconv.capture.watch.values import same
from distconv.communication import gradient_reduction
from distconv.tensor import DistTensor


@dataclass(frozen=True)
class Result:
    """A tensor that the step returns: its slot, and how users see it."""

    slot: int
    dist: Any
    shape: Any
    strides: Any

    def wrapped(self, block: torch.Tensor) -> torch.Tensor:
        """``block`` as users see it."""
        if self.dist is None:
            return block
        return DistTensor(block, self.dist, self.shape, self.strides)


@dataclass(eq=False)
class Run:
    """What a step has done."""

    recording: Recording
    result: Any
    """What it returned, with a Result for each tensor."""
    puts: list[tuple[Place, Any]]
    """Places into which it puts something, and that, with a Result for each tensor that it has made."""
    gradients: list[tuple[torch.Tensor, int | None]]
    """Leaves whose ``grad`` is another tensor, and its slot."""
    kept: list[tuple[torch.Tensor, int, Any]]
    """Leaves, slots of shares that are kept, and over which ranks they are to be summed."""
    state: State
    modules: list[torch.nn.Module]
    generators: list[torch.Generator]
    optimizers: Optimizers

    @property
    def results(self) -> list[Result]:
        """Tensors that are returned, and then those that are put somewhere."""
        values = (self.result, *(value for _, value in self.puts))
        return [each for value in values for each in flattened(value) if isinstance(each, Result)]

    def outputs(self) -> list[int]:
        """Slots of all tensors that it leaves: results, gradients, shares."""
        grads = [slot for _, slot in self.gradients if slot is not None]
        return [*(result.slot for result in self.results), *grads, *(slot for _, slot, _ in self.kept)]

    def gradient_slots(self) -> dict[int, int]:
        """Slots that were gradients, or kept shares of them, when the step began, by their numbers there."""
        numbers = {id(grad): n for n, grad in enumerate(self.state.gradients) if grad is not None}
        slots = enumerate(self.recording.slots)
        return {n: numbers[id(slot.value)] for n, slot in slots if slot.value is not None and id(slot.value) in numbers}

    def leaves(self) -> list[torch.Tensor]:
        """In the order of their numbers."""
        return [leaf for leaf, _ in self.state.leaves.values()]

    def held(self) -> list[torch.Tensor]:
        """Tensors that were there before, no gradients."""
        gradients = self.gradient_slots()
        return [
            slot.value
            for number, slot in enumerate(self.recording.slots)
            if slot.kind is Kind.HELD and number not in gradients and slot.value is not None
        ]


def recorded(
    function: Callable[..., Any],
    args: Sequence[Any],
    references: References,
    executed: Executed | None = None,
    modules: Iterable[torch.nn.Module] = (),
) -> Run:
    """Run ``function`` once, and put back what it has changed.

    ``executed`` notes what code runs; ``modules`` are some that it calls.
    """
    executed = executed or Executed()
    state = State()
    recorder = Recorder(state)
    optimizers = Optimizers()
    called = [each for each in (*references.values, *modules) if isinstance(each, torch.nn.Module)]
    before, places = Modules(called), Places()
    for module in before.modules:
        _add_leaves(module, state)
    places.add_modules(before.modules)
    references.add_to(places)
    copies: dict[int, Any] = {}
    given = mapped(lambda leaf: copies.setdefault(id(leaf), _example(leaf)), args)
    for leaf in flattened(given):
        if isinstance(leaf, torch.Tensor):
            recorder.add_input(block_of(leaf))
        else:
            recorder.recording.inputs.append(None)
    arguments = identity(given)

    def note(module: torch.nn.Module, _: Any) -> None:
        called.append(module)
        places.add_modules([module])
        _add_leaves(module, state)

    hook = register_module_forward_pre_hook(note)
    torch.clear_autocast_cache()  # What another run has cast has that run's graph.
    try:
        with seen(recorder), optimizers.noted(lambda reason: recorder.refuse(reason, "the step")):
            recording.active = recorder
            try:
                # The backward pass of a GPU has a thread of its own, whose calls have no line of the user's.
                with torch.autograd.set_multithreading_enabled(False), recorder, executed.noted(places.add_frame):
                    result = function(*given)
                run = _left(recorder, state, (result, places), called, optimizers)
            finally:
                recording.active = None
    finally:
        hook.remove()
        recorder.put_back()
        state.put_back()
        places.put_back()
    changed = before.difference()
    if changed:
        recorder.refuse(f"the step itself changes a module: {changed}")
    if not same(identity(given), arguments):
        recorder.refuse("the step puts something into an argument of it, which a replay does not: return it")
    return run


def _add_leaves(module: torch.nn.Module, state: State) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            state.add(block_of(parameter))


def _example(value: Any) -> Any:
    """An argument for a recording: tensors of their own, which the step may change and nothing else refers to."""
    if not isinstance(value, torch.Tensor) or block_of(value).requires_grad or block_of(value).layout != torch.strided:
        return value
    block = block_of(value)
    copy = torch.empty_strided(block.shape, block.stride(), dtype=block.dtype, device=block.device)
    if 0 in block.stride() and block.numel() > 1:
        copy = block.expand_as(block)
    else:
        copy.copy_(block)
    if not isinstance(value, DistTensor):
        return copy
    return DistTensor(copy, value.dist, value.shape, value._strides)


def _left(
    recorder: Recorder,
    state: State,
    left: tuple[Any, Places],
    modules: list[torch.nn.Module],
    optimizers: Optimizers,
) -> Run:
    """What is there now, by slots: what the step has returned, and what is in places, too."""

    def slot_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        block = block_of(value)
        if block.requires_grad and not recorder.went_back:
            recorder.refuse("a result needs a backward pass, which is not in the step: call it there, or no_grad")
        slot = recorder.slot(block)
        if isinstance(value, DistTensor):
            return Result(slot, value.dist, value.shape, value._strides)
        return Result(slot, None, None, None)

    def put(value: Any) -> Any:
        # A tensor that was there before is itself put somewhere.
        if isinstance(value, torch.Tensor) and recorder.kind(block_of(value)) is Kind.HELD:
            return value
        return slot_of(value)

    result, places = left
    outcome = mapped(slot_of, result)
    puts = [(place, mapped(put, place.now())) for place in places.changed()]
    gradients: list[tuple[torch.Tensor, int | None]] = []
    for leaf, before in state.leaves.values():
        now = gradient(leaf)
        if now is not before:
            gradients.append((leaf, None if now is None else recorder.slot(now)))
    kept = [(leaf, recorder.slot(share), comm) for leaf, share, comm in gradient_reduction.kept()]
    return Run(recorder.recording, outcome, puts, gradients, kept, state, modules, recorder.generators, optimizers)
