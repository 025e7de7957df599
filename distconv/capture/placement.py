"""Memory of the tensors of a replay, and removal of unneeded entries.

1. Small results, and buffers of messages, are allocated once and written by the same operator with ``out=``. Views of
   them are made once, too.
2. A chain of views of other memory becomes one ``as_strided`` of the tensor at its beginning.
3. Operators that return their argument, and operators whose results are unused, are removed.
4. An all-reduce of two ranks becomes an exchange and an addition.

The kernels that compute values, and their order, are those of the recording. So results have the same bits.
:mod:`.program` generates code from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from mpi4py import MPI

from distconv.capture.entries import Entry, Operator, Post, Recording, Ref, Slot, SlotOrigin, Sum, Wait, makes, reads

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
"""Operators that return their argument."""

_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
_ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)
_COPIES = (_aten.clone.default, _aten._to_copy.default)
_OUT = {
    _aten.cat.default: _aten.cat.out,
    _aten.stack.default: _aten.stack.out,
    _aten.add.Tensor: _aten.add.out,
    _aten.sub.Tensor: _aten.sub.out,
    _aten.mul.Tensor: _aten.mul.out,
    _aten.div.Tensor: _aten.div.out,
}
_GEOMETRIC = frozenset(
    getattr(_aten, name)
    for name in (
        *("as_strided", "_reshape_alias", "view", "_unsafe_view", "expand", "slice", "select", "diagonal", "unfold"),
        *("squeeze", "unsqueeze", "permute", "transpose", "t"),
    )
)
"""Views that shape, strides and offset determine, if the dtype is unchanged."""

_PACKING = (*_EMPTY, _aten.cat.default, _aten.clone.default)
"""Operators that allocate the buffers of messages."""

LARGEST_BUFFER = 1 << 20
"""Largest buffer of a message, in bytes, that is kept between replays."""

_SMALL = 1 << 14
"""Largest memory of any other result, in bytes, that is kept between replays. A step has a few hundred of them."""

_PAIRS = 1
"""Message tag of sums of two ranks: other messages between these ranks, with tag 0, may be in flight."""

AS_STRIDED = _aten.as_strided.default
_ADD = _aten.add_.Tensor
_COPY = _aten.copy_.default

WIDE = (torch.float32, torch.float64)


class below_autograd(ExitStack):
    """A context manager in which operators skip autograd and autocast, as they were recorded below both."""

    def __enter__(self) -> below_autograd:
        super().__enter__()
        self.enter_context(torch._C._ExcludeDispatchKeyGuard(_ABOVE))
        return self


_ABOVE = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradOther)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradNestedTensor)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
)


class Placement:
    """Memory and remaining entries for a recording.

    Parameters
    ----------
    recording : Recording
        The recording. It is not changed.
    outputs : sequence of int
        Slots of the tensors that a replay returns. Their memory is not kept between replays.
    gradients : dict of int to int
        For the slot of each gradient that is passed to a replay, its index among these gradients.

    Attributes
    ----------
    values : dict of int to Tensor
        Tensors that exist before a replay, by slot.
    entries : list of Entry
        The entries that a replay executes.
    """

    def __init__(self, recording: Recording, outputs: Sequence[int], gradients: dict[int, int]) -> None:
        self._slots, self._gradients = [*recording.slots], gradients
        self._pairs: dict[int, tuple[int, int]] = {}
        """Slots of this rank's and the other rank's contribution to each sum of two ranks, by number of the sum."""
        self.values = {
            number: slot.value.detach()
            for number, slot in enumerate(self._slots)
            if slot.value is not None and number not in gradients
        }
        self._same: dict[int, int] = {}
        """Representative of each slot whose tensor has several slots."""
        self._base: dict[int, int] = {}
        """Slot of the tensor at the beginning of the chain of views, by slot of the view."""
        self._taken: dict[tuple[Any, ...], int] = {}
        """Slots of the views that exist already, by base and geometry."""
        self._given = {self._slots[slot].storage for slot in outputs}
        self._posted = {
            self._slots[slot].storage
            for entry in recording.entries
            if isinstance(entry, Post) and entry.channel is None
            for slot in reads(entry)
        }
        self._reshaped = any(
            isinstance(entry, Operator) and torch.Tag.inplace_view in entry.function.tags
            for entry in recording.all_entries()
        )
        placed = [left for entry in recording.entries for left in self._placed(entry)]
        self.entries = self._needed(placed, outputs)

    def same(self, slot: int) -> int:
        """Return the representative of all slots of the same tensor."""
        return self._same.get(slot, slot)

    # -- one entry ----------------------------------------------------------------------------------------------------

    def _placed(self, entry: Entry) -> Sequence[Entry]:
        """Return the entries that replace ``entry``."""
        if isinstance(entry, Sum):
            return (self._sum(entry),)
        if isinstance(entry, Wait):
            return self._wait(entry)
        if not isinstance(entry, Operator):
            return (entry,)
        if entry.function is _COPY and len({self.same(slot) for slot in reads(entry)}) == 1:
            return ()
        if entry.writes or entry.draws or not entry.results or None in entry.results:
            return (entry,)
        if self._shares_memory(entry):
            return self._view(entry)
        result = entry.results[0]
        assert result is not None
        if entry.one and self._stays(entry, result):
            self.values[result] = self._room(result)
            return self._into(entry, result)
        return (entry,)

    def _stays(self, entry: Operator, result: int) -> bool:
        slot = self._slots[result]
        if result in self.values or slot.storage in self._given:
            return False
        if entry.function in _PACKING and slot.storage in self._posted:
            return slot.nbytes <= LARGEST_BUFFER
        placeable = entry.function in _OUT or entry.function in (*_EMPTY, *_ZEROS, *_COPIES)
        return placeable and slot.nbytes <= _SMALL

    def _room(self, number: int) -> torch.Tensor:
        shape, strides, offset, dtype, device = self._slots[number].geometry
        extent = (
            offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if 0 not in shape else 0
        )
        return torch.empty(extent, dtype=dtype, device=device).as_strided(shape, strides, offset)

    def _into(self, entry: Operator, result: int) -> Sequence[Entry]:
        """Return entries that write the result of ``entry`` into its memory."""
        args: tuple[Any, ...]
        function, kwargs = _OUT.get(entry.function), {}
        if entry.function in _EMPTY:
            return ()
        if entry.function in _ZEROS:
            function, args = _aten.zero_.default, (Ref(result),)
        elif function is None:
            function, args = _COPY, (Ref(result), entry.args[0])
        else:
            args, kwargs = entry.args, {**entry.kwargs, "out": Ref(result)}
        return (Operator(entry.line, function, args, kwargs, [result], True, frozenset([result])),)

    # -- sums of two ranks ------------------------------------------------------------------------------------------

    def _sum(self, entry: Sum) -> Entry:
        """Return an exchange in place of a sum of two ranks; any other sum unchanged.

        Each rank adds the contribution of the other one. With two terms the order of the sum does not change the bits.
        """
        mine, comm = self._slots[entry.slot], entry.comm
        shape, _, _, dtype, device = mine.geometry
        plain = entry.channel is None and entry.operation == MPI.SUM and dtype in WIDE
        if comm.size != 2 or not plain or mine.nbytes > LARGEST_BUFFER:
            return entry
        number, received = len(self._slots), torch.empty(shape, dtype=dtype, device=device)
        self._slots.append(Slot(SlotOrigin.MADE, -1, (shape, received.stride(), 0, dtype, device), None, mine.nbytes))
        self.values[number] = received
        self._pairs[entry.number] = entry.slot, number
        sends, receives = [(1 - comm.rank, entry.slot)], [(1 - comm.rank, number)]
        return Post(entry.line, entry.number, comm, sends, receives, entry.what, _PAIRS)

    def _wait(self, entry: Wait) -> Sequence[Entry]:
        if entry.number not in self._pairs:
            return (entry,)
        mine, received = self._pairs[entry.number]
        args = (Ref(mine), Ref(received))
        return entry, Operator(entry.line, _ADD, args, {}, [mine], True, frozenset([mine]))

    # -- views --------------------------------------------------------------------------------------------------------

    def _shares_memory(self, entry: Operator) -> bool:
        """Return True if ``entry`` uses one tensor, and all its results share memory with that tensor."""
        sources = reads(entry)
        if len(sources) != 1 or self._slots[sources[0]].storage == -1:
            return False
        return all(self._slots[result].storage == self._slots[sources[0]].storage for result in makes(entry))

    def _view(self, entry: Operator) -> Sequence[Entry]:
        source = self.same(reads(entry)[0])
        if source in self.values:
            with torch.no_grad(), below_autograd():
                views = entry.function(*self._now(entry.args), **self._now(entry.kwargs))
            self.values.update(zip(makes(entry), [views] if entry.one else views, strict=True))
            return ()
        result = entry.results[0]
        assert result is not None
        if entry.function in _SAME:
            self._same[result] = source
            return ()
        plain = entry.function.overloadpacket in _GEOMETRIC and not self._reshaped and source not in self._gradients
        same_dtype = self._slots[result].geometry[3] == self._slots[source].geometry[3]
        return self._by_geometry(entry, result, source) if plain and same_dtype else (entry,)

    def _by_geometry(self, entry: Operator, result: int, source: int) -> Sequence[Entry]:
        """Return an entry that makes a view of the base of ``source``; none if the same view exists."""
        base, geometry = self._base.get(source, source), self._slots[result].geometry
        if geometry == self._slots[source].geometry:
            there: int | None = source
        else:
            there = self._taken.get((base, geometry))
        if there is not None:
            self._same[result] = there
            return ()
        self._taken[base, geometry] = result
        self._base[result] = base
        return (Operator(entry.line, AS_STRIDED, (Ref(base), *geometry[:3]), {}, [result], True),)

    def _now(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.values[self.same(value.slot)]
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._now, value))
        if isinstance(value, dict):
            return {key: self._now(each) for key, each in value.items()}
        return value

    # -- all entries --------------------------------------------------------------------------------------------------

    def _needed(self, entries: Sequence[Entry], outputs: Sequence[int]) -> list[Entry]:
        """Return the entries that have an effect, or whose results are used."""
        used = set(map(self.same, outputs))
        left: list[Entry] = []
        for entry in reversed(entries):
            effect = not isinstance(entry, Operator) or entry.writes or entry.draws
            if effect or any(self.same(slot) in used for slot in makes(entry)):
                used.update(map(self.same, reads(entry)))
                left.append(entry)
        return left[::-1]
