"""Operations of a recording, and the tensors that they read and make.

Each tensor has a *slot*, and operations refer to it by the slot's number. :mod:`.recorder` makes operations;
:mod:`.buffer_plan`, :mod:`.replay_code` and :mod:`.graph` read them. This module contains data only and does not import
the rest of distconv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """A tensor among the arguments of an operation, by the number of its slot in ``Recording.slots``."""

    slot: int


class SlotOrigin(Enum):
    """Origin of the tensor of a slot."""

    EXISTING = "existing"
    """The tensor existed before the step: a parameter, a buffer, a constant. The recording refers to it."""
    CONSTANT = "constant"
    """Python made the tensor from numbers during the step. The recording keeps a copy."""
    INPUT = "input"
    """An argument of the step."""
    RESULT = "result"
    """The result of an operation."""


@dataclass(eq=False)
class Slot:
    """A tensor of the recording."""

    origin: SlotOrigin
    storage: int
    """Number of its storage, equal for tensors that share memory; -1 if unknown."""
    geometry: tuple[Any, ...]
    """Shape, strides, offset, dtype and device."""
    tensor: torch.Tensor | None = None
    """The tensor itself, for EXISTING and CONSTANT."""
    nbytes: int = 0
    """Size of its elements in bytes."""


@dataclass(eq=False)
class Op:
    """An operation of a replay."""

    line: str
    """The line of the user's script from which it was called."""


@dataclass(eq=False)
class OperatorCall(Op):
    """A call of one of torch's operators."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int | None]
    """Slots of the results; None for a result that is not a tensor."""
    returns_one: bool
    """True if it returns one tensor, or None. Otherwise it returns several."""
    writes: frozenset[int] = frozenset()
    """Slots that it changes in place."""
    draws: bool = False
    """True if it uses a random generator. Otherwise it is deterministic."""


@dataclass(eq=False)
class FunctionCall(Op):
    """A call of a Python function that reads values, or does work that is not an operator of torch."""

    function: Callable[..., Any]
    args: tuple[int, ...]
    """Slots of the arguments."""
    results: list[int]
    returns_one: bool
    """True if it returns one tensor, or None. Otherwise it returns several."""
    launches: bool = False
    """True if it only launches kernels on a GPU. Otherwise the host may read values."""


@dataclass(eq=False)
class SendReceive(Op):
    """The start of point-to-point messages."""

    number: int
    """Number of the operation, by which :class:`WaitFor` refers to it."""
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
class AllReduce(Op):
    """The start of an all-reduce in place."""

    number: int
    """Number of the operation, by which :class:`WaitFor` refers to it."""
    comm: Any
    slot: int
    mpi_op: Any
    """The MPI operation."""
    what: str
    """Description for the watchdog."""
    channel: Any = None
    """The channel of process groups that reduces; None for MPI."""


@dataclass(eq=False)
class WaitFor(Op):
    """The completion of a :class:`SendReceive` or a :class:`AllReduce`."""

    number: int
    """Number of the SendReceive or AllReduce."""
    slots: tuple[int, ...]
    """Slots whose memory MPI uses until then."""


@dataclass(eq=False)
class TryOnAllRanks(Op):
    """Operations that may fail on some ranks of ``world``. After a failure all of these ranks raise."""

    world: Any
    operations: list[Op]


def iter_slots(value: Any) -> Iterator[int]:
    """Yield the slots of the tensors among arguments of an operator."""
    if isinstance(value, Ref):
        yield value.slot
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from iter_slots(each)
    elif isinstance(value, dict):
        yield from iter_slots(list(value.values()))


def slots_read(op: Op) -> list[int]:
    """Return the slots that ``op`` uses, including those that it changes in place."""
    if isinstance(op, OperatorCall):
        return [*iter_slots(op.args), *iter_slots(op.kwargs)]
    if isinstance(op, SendReceive):
        return [slot for _, slot in (*op.sends, *op.receives)]
    if isinstance(op, AllReduce):
        return [op.slot]
    if isinstance(op, TryOnAllRanks):
        return [slot for each in op.operations for slot in slots_read(each)]
    return list(op.args if isinstance(op, FunctionCall) else op.slots if isinstance(op, WaitFor) else ())


def slots_made(op: Op) -> list[int]:
    """Return the slots of the results of ``op``."""
    if isinstance(op, TryOnAllRanks):
        return [slot for each in op.operations for slot in slots_made(each)]
    return [slot for slot in op.results if slot is not None] if isinstance(op, (OperatorCall, FunctionCall)) else []


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
    """The operations and slots of one run of a step on this rank."""

    slots: list[Slot] = field(default_factory=list)
    operations: list[Op] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    """Unsupported operations of the step, each with its line. A step with any of them cannot be replayed."""
    inputs: list[int | None] = field(default_factory=list)
    """The slot of each argument that is a tensor, in order; None for other arguments."""

    @property
    def gpu(self) -> torch.device | None:
        """The first GPU that holds a tensor; None if all tensors are on the CPU."""
        return next((device for slot in self.slots if (device := slot.geometry[-1]).type == "cuda"), None)

    def all_operations(self) -> Iterator[Op]:
        """Yield all operations, including those inside a :class:`TryOnAllRanks`."""
        for op in self.operations:
            yield op
            if isinstance(op, TryOnAllRanks):
                yield from op.operations

    def comms(self) -> list[Any]:
        """Return the communicators of all messages and all-reduces, each once."""
        return list(
            {e.comm.handle: e.comm for e in self.all_operations() if isinstance(e, (SendReceive, AllReduce))}.values()
        )
