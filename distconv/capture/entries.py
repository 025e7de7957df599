"""The instructions of a recording (entries), and the tensors that they read and make (slots)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """A tensor among the arguments of an entry, by the number of its slot."""

    slot: int


class Kind(Enum):
    """Origin of the tensor of a slot."""

    HELD = "held"
    """It existed before the step: a parameter, a buffer, a constant. The recording refers to it."""
    CONSTANT = "constant"
    """Python made it of numbers while the step ran. The recording keeps a copy."""
    INPUT = "input"
    """An argument of the step."""
    MADE = "made"
    """The result of an entry."""


@dataclass(eq=False)
class Slot:
    """A tensor of the recording."""

    kind: Kind
    storage: int
    """Number of its storage: equal for tensors that share memory."""
    geometry: tuple[Any, ...]
    """Shape, strides, offset, dtype and device."""
    value: torch.Tensor | None = None
    """The tensor itself, for HELD and CONSTANT."""
    nbytes: int = 0


@dataclass(eq=False)
class Entry:
    """An instruction of a replay."""

    line: str
    """The line of the user's script from which it was called."""


@dataclass(eq=False)
class Operator(Entry):
    """A call of one of torch's operators."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int | None]
    one: bool
    """True if it returns one tensor, or None; False if it returns several."""
    writes: frozenset[int] = frozenset()
    """Slots that it changes in place."""
    draws: bool = False
    """True if it takes random numbers."""


@dataclass(eq=False)
class Call(Entry):
    """A call of a Python function that looks at values, or does what no operator of torch does."""

    function: Callable[..., Any]
    args: tuple[int, ...]
    results: list[int]
    one: bool
    launches: bool = False
    """True if it only launches kernels on a GPU."""


@dataclass(eq=False)
class Post(Entry):
    """The start of point-to-point messages, as pairs of a peer and a slot."""

    number: int
    comm: Any
    sends: list[tuple[int, int]]
    receives: list[tuple[int, int]]
    what: str
    tag: int = 0
    channel: Any = None
    """The channel of process groups that carries them; None for MPI."""


@dataclass(eq=False)
class Sum(Entry):
    """The start of a reduction over ranks, in place."""

    number: int
    comm: Any
    slot: int
    operation: Any
    what: str
    channel: Any = None


@dataclass(eq=False)
class Wait(Entry):
    """The completion of a Post or a Sum, by its number. MPI uses the memory of ``slots`` until then."""

    number: int
    slots: tuple[int, ...]


@dataclass(eq=False)
class Together(Entry):
    """Entries that may fail on some ranks of ``world``. All ranks learn of a failure."""

    world: Any
    entries: list[Entry]


def refs(value: Any) -> Iterator[int]:
    """Yield the slots among arguments."""
    if isinstance(value, Ref):
        yield value.slot
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from refs(each)
    elif isinstance(value, dict):
        yield from refs(list(value.values()))


def reads(entry: Entry) -> list[int]:
    """Return the slots that ``entry`` needs, those that it changes in place included."""
    if isinstance(entry, Operator):
        return [*refs(entry.args), *refs(entry.kwargs)]
    if isinstance(entry, Post):
        return [slot for _, slot in (*entry.sends, *entry.receives)]
    if isinstance(entry, Sum):
        return [entry.slot]
    if isinstance(entry, Together):
        return [slot for each in entry.entries for slot in reads(each)]
    return list(entry.args if isinstance(entry, Call) else entry.slots if isinstance(entry, Wait) else ())


def makes(entry: Entry) -> list[int]:
    """Return the slots of the results of ``entry``."""
    if isinstance(entry, Together):
        return [slot for each in entry.entries for slot in makes(each)]
    return [slot for slot in entry.results if slot is not None] if isinstance(entry, (Operator, Call)) else []


def strides_in_use(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of dimensions with more than one index. The others may differ without an effect."""
    return tuple(step for extent, step in zip(shape, strides, strict=True) if extent > 1)


@dataclass(eq=False)
class Recording:
    """All that a step does."""

    slots: list[Slot] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """Reasons, with lines, for which the step cannot be replayed."""
    inputs: list[int | None] = field(default_factory=list)
    """The slot of each argument that is a tensor, in order; None for other arguments."""

    @property
    def gpu(self) -> torch.device | None:
        """The GPU of its tensors, if any is on one."""
        return next((device for slot in self.slots if (device := slot.geometry[-1]).type == "cuda"), None)

    def all_entries(self) -> Iterator[Entry]:
        """Yield the entries, those inside of others included."""
        for entry in self.entries:
            yield entry
            if isinstance(entry, Together):
                yield from entry.entries

    def comms(self) -> list[Any]:
        """Return each communicator that it uses once."""
        return list({e.comm.handle: e.comm for e in self.all_entries() if isinstance(e, (Post, Sum))}.values())
