"""Operations of a recording (entries), and the tensors that they read and make (slots).

:mod:`.recorder` makes them; :mod:`.placement`, :mod:`.program` and :mod:`.graph` read them. This module contains data
only and does not import the rest of distconv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """A tensor among the arguments of an entry, by the number of its slot."""

    slot: int


class SlotOrigin(Enum):
    """Origin of the tensor of a slot."""

    HELD = "held"
    """The tensor existed before the step: a parameter, a buffer, a constant. The recording refers to it."""
    CONSTANT = "constant"
    """Python made the tensor from numbers during the step. The recording keeps a copy."""
    INPUT = "input"
    """An argument of the step."""
    MADE = "made"
    """The result of an entry."""


@dataclass(eq=False)
class Slot:
    """A tensor of the recording."""

    kind: SlotOrigin
    storage: int
    """Number of its storage, equal for tensors that share memory; -1 if unknown."""
    geometry: tuple[Any, ...]
    """Shape, strides, offset, dtype and device."""
    value: torch.Tensor | None = None
    """The tensor itself, for HELD and CONSTANT."""
    nbytes: int = 0
    """Size of its elements in bytes."""


@dataclass(eq=False)
class Entry:
    """An operation of a replay."""

    line: str
    """The line of the user's script from which it was called."""


@dataclass(eq=False)
class Operator(Entry):
    """A call of one of torch's operators."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int | None]
    """Slots of the results; None for a result that is not a tensor."""
    one: bool
    """True if it returns one tensor, or None. Otherwise it returns several."""
    writes: frozenset[int] = frozenset()
    """Slots that it changes in place."""
    draws: bool = False
    """True if it uses a random generator. Otherwise it is deterministic."""


@dataclass(eq=False)
class Call(Entry):
    """A call of a Python function that reads values, or does work that is not an operator of torch."""

    function: Callable[..., Any]
    args: tuple[int, ...]
    """Slots of the arguments."""
    results: list[int]
    one: bool
    """True if it returns one tensor, or None. Otherwise it returns several."""
    launches: bool = False
    """True if it only launches kernels on a GPU. Otherwise the host may read values."""


@dataclass(eq=False)
class Post(Entry):
    """The start of point-to-point messages."""

    number: int
    """Number of the operation, by which :class:`Wait` refers to it."""
    comm: Any
    sends: list[tuple[int, int]]
    """Peer and slot of each message to send."""
    receives: list[tuple[int, int]]
    """Peer and slot of each message to receive."""
    what: str
    """Description for the watchdog."""
    tag: int = 0
    channel: Any = None
    """The channel of process groups that sends the messages; None for MPI."""


@dataclass(eq=False)
class Sum(Entry):
    """The start of an all-reduce in place."""

    number: int
    """Number of the operation, by which :class:`Wait` refers to it."""
    comm: Any
    slot: int
    operation: Any
    """The MPI operation."""
    what: str
    """Description for the watchdog."""
    channel: Any = None
    """The channel of process groups that reduces; None for MPI."""


@dataclass(eq=False)
class Wait(Entry):
    """The completion of a :class:`Post` or a :class:`Sum`."""

    number: int
    """Number of the Post or Sum."""
    slots: tuple[int, ...]
    """Slots whose memory MPI uses until then."""


@dataclass(eq=False)
class Together(Entry):
    """Entries that may fail on some ranks of ``world``. After a failure all of these ranks raise."""

    world: Any
    entries: list[Entry]


def refs(value: Any) -> Iterator[int]:
    """Yield the slots of the tensors among arguments of an operator."""
    if isinstance(value, Ref):
        yield value.slot
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from refs(each)
    elif isinstance(value, dict):
        yield from refs(list(value.values()))


def reads(entry: Entry) -> list[int]:
    """Return the slots that ``entry`` uses, including those that it changes in place."""
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
    """Return the strides of the dimensions that have more than one index.

    The other strides have no effect, so tensors that differ in them have the same layout.

    Parameters
    ----------
    shape : sequence of int
        Shape of a tensor.
    strides : sequence of int
        Its strides, in elements.

    Returns
    -------
    tuple of int
        One stride for each dimension whose size is greater than 1.
    """
    return tuple(step for extent, step in zip(shape, strides, strict=True) if extent > 1)


@dataclass(eq=False)
class Recording:
    """The entries and slots of one run of a step on this rank."""

    slots: list[Slot] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """Unsupported operations of the step, each with its line. A step with any of them cannot be replayed."""
    inputs: list[int | None] = field(default_factory=list)
    """The slot of each argument that is a tensor, in order; None for other arguments."""

    @property
    def gpu(self) -> torch.device | None:
        """The first GPU that holds a tensor; None if all tensors are on the CPU."""
        return next((device for slot in self.slots if (device := slot.geometry[-1]).type == "cuda"), None)

    def all_entries(self) -> Iterator[Entry]:
        """Yield all entries, including those inside a :class:`Together`."""
        for entry in self.entries:
            yield entry
            if isinstance(entry, Together):
                yield from entry.entries

    def comms(self) -> list[Any]:
        """Return the communicators of all messages and all-reduces, each once."""
        return list({e.comm.handle: e.comm for e in self.all_entries() if isinstance(e, (Post, Sum))}.values())
