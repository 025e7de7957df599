"""What a recording consists of: slots, which stand for tensors, and entries, which are done again in each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """A tensor among the arguments of an entry, by its slot."""

    slot: int


class Kind(Enum):
    """Where the tensor of a slot comes from."""

    HELD = "held"
    """It was there before: a parameter, a buffer, a constant. The recording holds it."""
    CONSTANT = "constant"
    """Python made it of numbers. The recording holds it."""
    INPUT = "input"
    """An argument of the step."""
    MADE = "made"
    """An entry makes it."""


@dataclass(eq=False)
class Slot:
    """A tensor of the recording."""

    kind: Kind
    storage: int
    """The same number for tensors that share memory."""
    geometry: tuple[Any, ...]
    """Shape, strides, offset, dtype and device."""
    value: torch.Tensor | None = None
    """Of one that the recording holds."""
    nbytes: int = 0


def strides_that_count(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of dimensions with more than one index: the others are as autograd takes or copies a gradient."""
    return tuple(step for extent, step in zip(shape, strides, strict=True) if extent > 1)


@dataclass(eq=False)
class Entry:
    """Something that a replay does."""

    line: str
    """The user's."""

    def reads(self) -> Iterator[int]:
        """Slots that it needs."""
        return self._reads()

    def makes(self) -> Iterator[int]:
        """Slots that it sets."""
        return self._makes()

    def text(self) -> str:
        """What it does: the same text if it does the same."""
        return self._text()

    def _reads(self) -> Iterator[int]:
        return iter(())

    def _makes(self) -> Iterator[int]:
        return iter(())

    def _text(self) -> str:
        return type(self).__name__


def refs(value: Any) -> Iterator[int]:
    """Slots among arguments."""
    if isinstance(value, Ref):
        yield value.slot
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from refs(each)
    elif isinstance(value, dict):
        yield from refs(list(value.values()))


@dataclass(eq=False)
class Operator(Entry):
    """A call of one of torch's operators on blocks."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int | None]
    one: bool
    """Whether it returns one tensor, or None, not several."""
    writes: frozenset[int] = frozenset()
    """Slots that it changes."""
    draws: bool = False
    """Whether it takes random numbers."""

    def _reads(self) -> Iterator[int]:
        yield from refs(self.args)
        yield from refs(self.kwargs)

    def _makes(self) -> Iterator[int]:
        return (slot for slot in self.results if slot is not None)

    def _text(self) -> str:
        return f"{self.function} {self.args!r} {self.kwargs!r} -> {self.results}"


@dataclass(eq=False)
class Call(Entry):
    """A call of a function of ours that looks at values, or does what is no operator of torch."""

    function: Callable[..., Any]
    args: tuple[int, ...]
    results: list[int]
    one: bool
    launches: bool = False
    """Whether it only gives work to a GPU."""

    def _reads(self) -> Iterator[int]:
        return iter(self.args)

    def _makes(self) -> Iterator[int]:
        return iter(self.results)

    def _text(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{name} {self.args} -> {self.results}"


@dataclass(eq=False)
class Post(Entry):
    """Messages that are posted: pairs of a peer and a slot."""

    number: int
    comm: Any
    sends: list[tuple[int, int]]
    receives: list[tuple[int, int]]
    what: str
    tag: int = 0
    channel: Any = None
    """Of process groups, if they do not go by MPI."""

    def _reads(self) -> Iterator[int]:
        return (slot for _, slot in (*self.sends, *self.receives))

    def _text(self) -> str:
        return f"post {self.comm.handle} {self.sends} {self.receives}"


@dataclass(eq=False)
class Sum(Entry):
    """A sum over ranks that is started, in the memory of a slot."""

    number: int
    comm: Any
    slot: int
    operation: Any
    what: str
    channel: Any = None

    def _reads(self) -> Iterator[int]:
        return iter((self.slot,))

    def _text(self) -> str:
        return f"sum {self.comm.handle} {self.slot}"


@dataclass(eq=False)
class Wait(Entry):
    """Waits for messages, or a sum, by their number; until then MPI uses the memory of ``slots``."""

    number: int
    slots: tuple[int, ...]

    def _reads(self) -> Iterator[int]:
        return iter(self.slots)

    def _text(self) -> str:
        return f"wait {self.number}"


@dataclass(eq=False)
class Begin(Entry):
    """What follows up to its end is done if the flag is true; without a flag, it may fail on some ranks."""

    flag: int | None
    world: Any = None

    def _reads(self) -> Iterator[int]:
        return iter(()) if self.flag is None else iter((self.flag,))

    def _text(self) -> str:
        return f"begin {self.flag}"


@dataclass(eq=False)
class End(Entry):
    """The end of what the last open one began."""


@dataclass(eq=False)
class SetGenerator(Entry):
    """The default generator is set to a state that a slot has."""

    slot: int

    def _reads(self) -> Iterator[int]:
        return iter((self.slot,))

    def _text(self) -> str:
        return f"set generator {self.slot}"


@dataclass(eq=False)
class Refusal:
    """Why a step cannot be recorded."""

    reason: str
    line: str


@dataclass(eq=False)
class Recording:
    """All of what a step does."""

    slots: list[Slot] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    inputs: list[int | None] = field(default_factory=list)
    """Slots of the blocks of the arguments that are tensors, in their order."""

    @property
    def gpu(self) -> torch.device | None:
        """That of its tensors, if any is on one."""
        return next((device for slot in self.slots if (device := slot.geometry[-1]).type == "cuda"), None)

    def comms(self) -> list[Any]:
        """All communicators that it uses, once each."""
        comms = {e.comm.handle: e.comm for e in self.entries if isinstance(e, (Post, Sum))}
        return list(comms.values())
