"""What a step has left, bit for bit: to compare a replay with the eager step, and to put back what was before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from distconv.capture.entries import Kind, Operator, Post, Sum, strides_that_count
from distconv.capture.state import State, gradient
from distconv.capture.step.run import Run
from distconv.capture.watch.arguments import block_of
from distconv.capture.watch.structures import flattened
from distconv.communication import gradient_reduction
from distconv.communication.digest import bytes_of, digest

_SPREAD = 8
"""So many times as far from a step as another run of it may a replay be, where kernels add in no fixed order."""


class Memory:
    """Memory that a step may change, that of leaves' gradients and random generators: as it is when this is made."""

    def __init__(self, run: Run, blocks: Sequence[Any]) -> None:
        self._storages = {s.data_ptr(): (s, s.clone()) for s in (t.untyped_storage() for t in written(run, blocks))}
        self._state = State()
        for leaf in run.leaves():
            self._state.add(leaf)
        generators = {id(g): g for g in (*run.generators, torch.default_generator)}
        self._places = [(place, place.now()) for place, _ in run.puts]
        self._generators = [(generator, generator.get_state()) for generator in generators.values()]

    def put_back(self) -> None:
        """Let all of it be what it was."""
        self._state.put_back()
        for place, value in self._places:
            place.put(value)
        for storage, values in self._storages.values():
            storage.copy_(values)
        for generator, state in self._generators:
            generator.set_state(state)


def written(run: Run, blocks: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors whose memory the step writes to and has not made; of arguments with ``blocks``."""
    slots, gradients = run.recording.slots, run.gradient_slots()
    now = [*map(gradient, run.leaves()), *(share for _, share, _ in gradient_reduction.kept())]
    storages = {slots[slot].storage for slot in _written_slots(run)}
    tensors: list[torch.Tensor | None] = []
    for number, slot in enumerate(slots):
        if slot.storage in storages and slot.kind is Kind.HELD:
            tensors.append(now[gradients[number]] if number in gradients else slot.value)
    for place, given in enumerate(run.recording.inputs):
        if given is not None and slots[given].storage in storages:
            tensors.append(blocks[place])
    return [tensor for tensor in tensors if tensor is not None]


def _written_slots(run: Run) -> Iterable[int]:
    for entry in run.recording.entries:
        if isinstance(entry, Operator):
            yield from entry.writes
        elif isinstance(entry, Post):
            yield from (slot for _, slot in entry.receives)
        elif isinstance(entry, Sum):
            yield entry.slot


class Outcome:
    """Values of what a step leaves, by what they are called."""

    def __init__(self, run: Run, blocks: Sequence[Any], result: Any) -> None:
        tensors = [each for each in flattened(result) if isinstance(each, torch.Tensor)]
        self.values: list[tuple[str, torch.Tensor | None]] = []
        self.values += [(f"result {n}", block_of(tensor)) for n, tensor in enumerate(tensors)]
        for place, _ in run.puts:
            inside = [each for each in flattened(place.now()) if isinstance(each, torch.Tensor)]
            self.values += [(f"tensor {n} in {place.name}", block_of(tensor)) for n, tensor in enumerate(inside)]
        self.values += [(f"the gradient of {_name(leaf)}", gradient(leaf)) for leaf in run.leaves()]
        self.values += [(f"a buffer or parameter, {_name(t)}", t) for t in written(run, blocks)]
        self.values += [(f"a kept share of {_name(leaf)}", share) for leaf, share, _ in gradient_reduction.kept()]
        self.values += [("the random generator", g.get_state()) for g in (*run.generators, _default())]
        self.values = [(name, None if t is None else t.detach().clone()) for name, t in self.values]

    def difference(self, other: Outcome) -> str:
        """What first is not bit for bit the same; empty if all is."""
        if [name for name, _ in self.values] != [name for name, _ in other.values]:
            return "other tensors"
        for (name, mine), (_, its) in zip(self.values, other.values, strict=True):
            if (mine is None) != (its is None) or (mine is not None and its is not None and not _equal(mine, its)):
                return name
        return ""

    def far_from(self, other: Outcome, again: Outcome) -> str:
        """What first differs by more than half of its digits and than ``_SPREAD`` times as ``again`` does; or empty.

        ``other`` and ``again`` are of the same step. Digits are those of a tensor's largest value.
        """
        for (name, mine), (_, its), (_, second) in zip(self.values, other.values, again.values, strict=True):
            if mine is None or its is None or second is None:
                if mine is not its:
                    return name
            elif not _near(mine, its, second):
                return name
        return ""


def _near(one: torch.Tensor, other: torch.Tensor, again: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype) or not one.is_floating_point():
        return _equal(one, other)
    if not one.numel():
        return True
    spread = (again - other).abs().max()
    bound = torch.maximum(torch.finfo(one.dtype).eps ** 0.5 * other.abs().max(), _SPREAD * spread)
    return bool(((one - other).abs() <= bound).all())


def _default() -> torch.Generator:
    return torch.default_generator


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, its = ((t.shape, t.dtype, strides_that_count(t.shape, t.stride())) for t in (one, other))
    if mine != its:
        return False
    return bytes_of(one).tobytes() == bytes_of(other).tobytes()


def _name(tensor: torch.Tensor) -> str:
    return getattr(tensor, "_distconv_deferred", "") or f"a tensor of shape {tuple(tensor.shape)}"


def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """What tells the values of ``tensors`` apart."""
    return [digest(tensor) for tensor in tensors]
