"""Where two runs of a step did something else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from distconv.capture.entries import Entry, Kind, Operator, Recording, Ref, strides_that_count
from distconv.capture.step.run import Result, Run
from distconv.capture.watch.structures import flattened, structure
from distconv.capture.watch.values import same

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
        # All else is there once it has been put there.
        elif any(isinstance(each, Result) for each in flattened(value)):
            return f"the step sets {name}, but not each time: take a step before dc.capture, or return it"
    return ""


def _same_values(one: Any, other: Any) -> bool:
    """Whether two values have the same structure, and are the same apart from tensors that a step has made."""
    return structure(one) == structure(other) and all(map(_same_leaf, flattened(one), flattened(other)))


def _same_leaf(one: Any, other: Any) -> bool:
    return bool(one == other) if isinstance(other, Result) else same(one, other)


def _other_result(one: Any, other: Any) -> str:
    """What two runs have returned that is not the same, apart from tensors: a replay returns it as it is."""
    if structure(one) != structure(other):
        return "the step does not return the same each time"
    for before, now in zip(flattened(one), flattened(other), strict=True):
        if not _same_leaf(before, now):
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
