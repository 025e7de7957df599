"""One run of a step while it is recorded, and all that it leaves: results, gradients, shares, memory.

A run changes nothing: what it has written to is put back, and so are gradients and random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from distconv import recording
from distconv.capture.entries import Entry, Kind, Operator, Recording, Ref, strides_that_count
from distconv.capture.recorder import Recorder
from distconv.capture.state import State, gradient
from distconv.capture.unseen import seen
from distconv.capture.watch.arguments import block_of, identity
from distconv.capture.watch.executed import Executed
from distconv.capture.watch.modules import Modules
from distconv.capture.watch.optimizers import Optimizers
from distconv.capture.watch.places import Place, Places
from distconv.capture.watch.references import References
from distconv.capture.watch.structures import flattened, mapped, structure
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


_DETACH = torch.ops.aten.detach.default
_ROOM = torch.ops.aten.new_empty_strided.default
_COPY = torch.ops.aten.copy_.default

_SHOWN = 160
"""Characters of a call that an error shows."""


def difference(one: Run, other: Run) -> str:
    """Where two runs did something else, as a sentence; empty if they did the same."""
    (mine_done, mine_taken), (its_done, its_taken) = map(_done, (one.recording, other.recording))
    for (_, before), (line, now) in zip(mine_done, its_done, strict=False):
        if before != now:
            texts = (text[:_SHOWN] for text in (now, before))
            return f"{line}: another call, or other numbers, than the time before: {' and before '.join(texts)}"
    if len(mine_done) != len(its_done):
        return "the step does not do the same each time"
    elsewhere = other_places(one, other)
    if elsewhere:
        return elsewhere
    if len(one.recording.slots) != len(other.recording.slots):
        return "the step does not leave the same tensors each time"
    either = mine_taken ^ its_taken
    for number, (mine, its) in enumerate(zip(one.recording.slots, other.recording.slots, strict=True)):
        layouts = [_layout(slot.geometry, number in either) for slot in (mine, its)]
        if layouts[0] != layouts[1] or mine.kind is not its.kind:
            return "a tensor of the step does not have the same shape each time"
        if mine.kind is Kind.HELD and not _same_memory(mine.value, its.value):
            return f"{_user(other, number)}: a tensor is made anew each time, past torch's operators"
        if mine.kind is Kind.CONSTANT and not _equal(mine.value, its.value):
            return f"{_user(other, number)}: Python makes another number each time"
    return _other_result(one.result, other.result)


def other_places(one: Run, other: Run) -> str:
    """Where two runs have put something else, as a sentence; empty if nowhere."""
    mine, its = ({place.identity: (place.name, value) for place, value in run.puts} for run in (one, other))
    for key, (name, value) in {**mine, **its}.items():
        if key in mine and key in its:
            if not _same_values(mine[key][1], value):
                return f"the step sets {name}, to something else each time, which a replay does not: return it"
        elif any(
            isinstance(each, Result) for each in flattened(value)
        ):  # All else is there once it has been put there.
            return f"the step sets {name}, but not each time: take a step before dc.capture, or return it"
    return ""


def _same_values(one: Any, other: Any) -> bool:
    """Whether two values have the same structure, and are the same apart from tensors that a step has made."""
    pairs = zip(flattened(one), flattened(other), strict=False)
    return structure(one) == structure(other) and all(
        mine == its if isinstance(its, Result) else same(mine, its) for mine, its in pairs
    )


def _other_result(one: Any, other: Any) -> str:
    """What two runs have returned that is not the same, apart from tensors: a replay returns it as it is."""
    if structure(one) != structure(other):
        return "the step does not return the same each time"
    for before, now in zip(flattened(one), flattened(other), strict=True):
        if not (before == now if isinstance(now, Result) else same(before, now)):
            kind = type(now).__name__
            return (
                f"the step returns an object of type {kind}, another one, or with another value, each time: return "
                "tensors, and numbers that stay, alone or in lists, tuples, dictionaries or dataclasses"
            )
    return ""


def _layout(geometry: tuple[Any, ...], anywhere: bool) -> tuple[Any, ...]:
    """What two runs must have alike; ``anywhere`` in its memory."""
    shape, strides, *others = geometry
    if not isinstance(strides, tuple):  # of a layout that is refused
        return geometry
    return shape, strides_that_count(shape, strides), *(() if anywhere else others)


def _done(recording: Recording) -> tuple[list[tuple[str, str]], set[int]]:
    """Lines and texts of what is done, and slots of gradients that lie where the contribution to them lay.

    Autograd takes a contribution that nothing else refers to for the gradient itself, and copies any other; how long
    something refers to it differs from run to run. The numbers are the same, so both have one text.
    """
    done: list[tuple[str, str]] = []
    taken: set[int] = set()
    copied = False
    for entry, behind in pairwise([*recording.entries, None]):
        assert entry is not None
        if copied:
            copied = False
            continue
        slots = _given(entry, behind)
        done.append((entry.line, entry.text() if slots is None else "{} -> {}".format(*slots)))
        copied = slots is not None and behind is not None and slots[1] in behind.makes()
        if slots is not None and not copied:
            taken.add(slots[1])
    return done, taken


def _given(entry: Entry, behind: Entry | None) -> tuple[int, int] | None:
    """The slots of a tensor and of one with the same numbers that ``entry``, or it and the one behind it, makes."""
    if not isinstance(entry, Operator) or entry.function not in (_DETACH, _ROOM) or entry.results[0] is None:
        return None
    source, result = entry.args[0], entry.results[0]
    copy = isinstance(behind, Operator) and behind.function is _COPY and behind.args == (Ref(result), source)
    return (source.slot, result) if entry.function is _DETACH or copy else None


def _same_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is other:
        return True
    return one is not None and other is not None and one.data_ptr() == other.data_ptr() and one.numel() > 0


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    assert one is not None and other is not None
    return torch.equal(one, other) or bool((one.isnan() & other.isnan()).all())


def _user(run: Run, slot: int) -> str:
    return next((entry.line for entry in run.recording.entries if slot in entry.reads()), "")
