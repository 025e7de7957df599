"""Whether a step does the same whatever there is in the places into which it puts something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from distconv.capture.step.differences import difference, other_places
from distconv.capture.step.run import Result, Run
from distconv.capture.watch.arguments import block_of
from distconv.capture.watch.places import Key, Place
from distconv.capture.watch.structures import flattened, mapped, structure
from distconv.capture.watch.values import same
from distconv.tensor import DistTensor


def dependence(run: Run, again: Callable[[], Run], anywhere: Callable[[bool], bool]) -> str:
    """What the step does otherwise if it finds in its places what it puts there; empty if it does the same.

    ``again`` runs it once more, and ``anywhere`` tells whether something is so on any rank. Notes which places are
    free: with anything else in them it does the same, too. Collective.
    """
    if not anywhere(bool(run.puts)):
        return ""
    text, _ = _done_with(run, again, _alike)
    if anywhere(bool(text)):
        return text
    free = {place.identity for place, value in run.puts if _differs(value)}
    for stand_in in (_unlike, _nothing):
        other, put = _done_with(run, again, stand_in)
        free = set() if anywhere(bool(other)) else free & put
    for place, _ in run.puts:
        place.free = place.identity in free
    return ""


def _done_with(run: Run, again: Callable[[], Run], stand_in: Callable[[Run, Any], Any]) -> tuple[str, set[Key]]:
    """What the step does otherwise with other things in its places; and in which of them it puts something then."""
    for place, value in run.puts:
        place.put(stand_in(run, value))
    try:
        other = again()
        text = difference(run, other)
        if not text or text == other_places(run, other):
            return text, {place.identity for place, _ in other.puts}
    except Exception as error:  # a user's, of any kind
        text = f"{type(error).__name__}: {error}"
    finally:
        for place, _ in run.puts:
            place.put(place.before)
    names = ", ".join(place.name for place, _ in run.puts)
    return f"the step sets {names}, and depends on what was there before: pass that and return it ({text})", set()


def _alike(run: Run, value: Any) -> Any:
    """What a replay puts there, with other numbers."""

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Result):
            return leaf
        shape, strides, _, dtype, device = run.recording.slots[leaf.slot].geometry
        return leaf.wrapped(torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_())

    return mapped(tensor, value)


def _unlike(run: Run, value: Any) -> Any:
    """Something else of the same structure, such as a pass outside of the step may have left there."""
    return mapped(_other, value)


def _nothing(run: Run, value: Any) -> Any:
    return [] if isinstance(value, list) else None


def _other(leaf: Any) -> Any:
    if isinstance(leaf, Result):
        return torch.zeros(0, dtype=torch.uint8)
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, (int, float, complex)):
        return leaf + 1
    if isinstance(leaf, torch.Size):
        return torch.Size((*leaf, 1))
    return leaf + "'" if isinstance(leaf, str) else leaf


def _differs(value: Any) -> bool:
    """Whether there is something else of its structure."""
    return all(_other(leaf) is not leaf for leaf in flattened(value))


def unfitting(run: Run) -> Iterator[Place]:
    """Places of ``run`` in which is something with which the step might do something else."""
    for place, value in run.puts:
        if not (place.free or place.is_as_before() or _is_like(run, value, place.now())):
            yield place


def forget(run: Run) -> None:
    """Hold what was in places no longer, where it may be anything or is like what is put there.

    It has a graph, perhaps, with all that is in it.
    """
    for place, value in run.puts:
        if place.free or _is_like(run, value, place.before):
            place.forget()


def _is_like(run: Run, value: Any, other: Any) -> bool:
    """Whether ``other`` is ``value``, with tensors of their layout for the Results in that."""
    pairs = zip(flattened(value), flattened(other), strict=False)
    return structure(value) == structure(other) and all(
        _fills(run, mine, its) if isinstance(mine, Result) else same(mine, its) for mine, its in pairs
    )


def _fills(run: Run, result: Result, other: Any) -> bool:
    if not isinstance(other, torch.Tensor) or isinstance(other, DistTensor) is (result.dist is None):
        return False
    if isinstance(other, DistTensor) and (other.dist, other.shape) != (result.dist, result.shape):
        return False
    block, (shape, _, _, dtype, device) = block_of(other), run.recording.slots[result.slot].geometry
    return (block.shape, block.dtype, block.device) == (shape, dtype, device)
