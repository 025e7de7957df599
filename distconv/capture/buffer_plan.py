"""Memory of the tensors of a replay, and removal of unneeded operations.

1. Small results, and buffers of messages, are allocated once and written by the same operator with ``out=``. Views of
   them are made once, too.
2. A chain of views of other memory becomes one ``as_strided`` of the tensor at its beginning.
3. Operators that return their argument, and operators whose results are unused, are removed.
4. An all-reduce of two ranks becomes an exchange and an addition.

The kernels that compute values, and their order, are those of the recording. So results have the same bits.
:mod:`.replay_code` generates code from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from mpi4py import MPI

from distconv.capture.operations import (
    AllReduce,
    Op,
    OperatorCall,
    Recording,
    Ref,
    SendReceive,
    Slot,
    SlotOrigin,
    WaitFor,
    slots_made,
    slots_read,
)

_aten = torch.ops.aten
_IDENTITIES = (_aten.detach.default, _aten.alias.default)
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

MAX_MESSAGE_BYTES = 1 << 20
"""Largest buffer of a message, in bytes, that is kept between replays."""

_MAX_RESULT_BYTES = 1 << 14
"""Largest memory of any other result, in bytes, that is kept between replays. A step has a few hundred of them."""

_PAIR_TAG = 1
"""Message tag of sums of two ranks: other messages between these ranks, with tag 0, may be in flight."""

AS_STRIDED = _aten.as_strided.default
_ADD = _aten.add_.Tensor
_COPY = _aten.copy_.default

WIDE_DTYPES = (torch.float32, torch.float64)
"""Dtypes in which an all-reduce of two ranks is replaced by an exchange and an addition."""


class below_autograd(ExitStack):
    """A context manager in which operators skip autograd and autocast, as they were recorded below both."""

    def __enter__(self) -> below_autograd:
        super().__enter__()
        self.enter_context(torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD_KEYS))
        return self


_AUTOGRAD_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradOther)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradNestedTensor)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
)


class BufferPlan:
    """Memory and remaining operations for a recording.

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
    operations : list of Op
        The operations that a replay executes.
    """

    def __init__(self, recording: Recording, outputs: Sequence[int], gradients: dict[int, int]) -> None:
        self._slots, self._gradients = [*recording.slots], gradients
        self._pairs: dict[int, tuple[int, int]] = {}
        """Slots of this rank's and the other rank's contribution to each sum of two ranks, by number of the sum."""
        # Not those of gradients: each replay gets them as arguments, since the next step may have other tensors.
        self.values = {
            number: slot.tensor.detach()
            for number, slot in enumerate(self._slots)
            if slot.tensor is not None and number not in gradients
        }
        self._representatives: dict[int, int] = {}
        """Representative of each slot whose tensor has several slots."""
        self._base: dict[int, int] = {}
        """Slot of the tensor at the beginning of the chain of views, by slot of the view."""
        self._views: dict[tuple[Any, ...], int] = {}
        """Slots of the views that exist already, by base and geometry."""
        self._output_storages = {self._slots[slot].storage for slot in outputs}
        self._message_storages = {
            self._slots[slot].storage
            for op in recording.operations
            if isinstance(op, SendReceive) and op.channel is None
            for slot in slots_read(op)
        }
        self._has_inplace_views = any(
            isinstance(op, OperatorCall) and torch.Tag.inplace_view in op.function.tags
            for op in recording.all_operations()
        )
        replacements = [new for op in recording.operations for new in self._replace(op)]
        self.operations = self._remove_unneeded(replacements, outputs)

    def representative(self, slot: int) -> int:
        """Return the slot that stands for all slots of the same tensor: generated code has one variable for them."""
        return self._representatives.get(slot, slot)

    # -- one operation ------------------------------------------------------------------------------------------------

    def _replace(self, op: Op) -> Sequence[Op]:
        """Return the operations that replace ``op``."""
        if isinstance(op, AllReduce):
            return (self._exchange_pair(op),)
        if isinstance(op, WaitFor):
            return self._add_received(op)
        if not isinstance(op, OperatorCall):
            return (op,)
        if op.function is _COPY and len({self.representative(slot) for slot in slots_read(op)}) == 1:
            return ()
        # A draw must advance the generator in each replay.
        if op.writes or op.draws or not op.results or None in op.results:
            return (op,)
        if self._shares_memory(op):
            return self._view(op)
        result = op.results[0]
        assert result is not None
        if op.returns_one and self._is_kept(op, result):
            self.values[result] = self._allocate(result)
            return self._write_into(op, result)
        return (op,)

    def _is_kept(self, op: OperatorCall, result: int) -> bool:
        slot = self._slots[result]
        # The caller keeps the outputs of a replay, which the next replay must not overwrite.
        if result in self.values or slot.storage in self._output_storages:
            return False
        if op.function in _PACKING and slot.storage in self._message_storages:
            return slot.nbytes <= MAX_MESSAGE_BYTES
        placeable = op.function in _OUT or op.function in (*_EMPTY, *_ZEROS, *_COPIES)
        return placeable and slot.nbytes <= _MAX_RESULT_BYTES

    def _allocate(self, number: int) -> torch.Tensor:
        shape, strides, offset, dtype, device = self._slots[number].geometry
        # The recorded strides: for others a kernel may take another path, and round differently.
        extent = (
            offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if 0 not in shape else 0
        )
        return torch.empty(extent, dtype=dtype, device=device).as_strided(shape, strides, offset)

    def _write_into(self, op: OperatorCall, result: int) -> Sequence[Op]:
        """Return operations that write the result of ``op`` into its memory."""
        args: tuple[Any, ...]
        function, kwargs = _OUT.get(op.function), {}
        if op.function in _EMPTY:
            return ()
        if op.function in _ZEROS:
            function, args = _aten.zero_.default, (Ref(result),)
        elif function is None:
            function, args = _COPY, (Ref(result), op.args[0])
        else:
            args, kwargs = op.args, {**op.kwargs, "out": Ref(result)}
        return (OperatorCall(op.line, function, args, kwargs, [result], True, frozenset([result])),)

    # -- sums of two ranks ------------------------------------------------------------------------------------------

    def _exchange_pair(self, op: AllReduce) -> Op:
        """Return an exchange in place of a sum of two ranks; any other sum unchanged.

        Each rank adds the contribution of the other one. With two terms the order of the sum does not change the bits.
        """
        slot, comm = self._slots[op.slot], op.comm
        shape, _, _, dtype, device = slot.geometry
        # Two contributions are added once, in any order with the same bits. The order of more additions is that of MPI.
        plain = op.channel is None and op.mpi_op == MPI.SUM and dtype in WIDE_DTYPES
        if comm.size != 2 or not plain or slot.nbytes > MAX_MESSAGE_BYTES:
            return op
        number, received = len(self._slots), torch.empty(shape, dtype=dtype, device=device)
        self._slots.append(Slot(SlotOrigin.RESULT, -1, (shape, received.stride(), 0, dtype, device), None, slot.nbytes))
        self.values[number] = received
        self._pairs[op.number] = op.slot, number
        sends, receives = [(1 - comm.rank, op.slot)], [(1 - comm.rank, number)]
        return SendReceive(op.line, op.number, comm, sends, receives, op.what, _PAIR_TAG)

    def _add_received(self, op: WaitFor) -> Sequence[Op]:
        if op.number not in self._pairs:
            return (op,)
        contribution, received = self._pairs[op.number]
        args = (Ref(contribution), Ref(received))
        return op, OperatorCall(op.line, _ADD, args, {}, [contribution], True, frozenset([contribution]))

    # -- views --------------------------------------------------------------------------------------------------------

    def _shares_memory(self, op: OperatorCall) -> bool:
        """Return True if ``op`` uses one tensor, and all its results share memory with that tensor."""
        sources = slots_read(op)
        if len(sources) != 1 or self._slots[sources[0]].storage == -1:
            return False
        return all(self._slots[result].storage == self._slots[sources[0]].storage for result in slots_made(op))

    def _view(self, op: OperatorCall) -> Sequence[Op]:
        source = self.representative(slots_read(op)[0])
        # Views of memory that all replays share are made now, and no operation is left.
        if source in self.values:
            with torch.no_grad(), below_autograd():
                views = op.function(*self._resolve(op.args), **self._resolve(op.kwargs))
            self.values.update(zip(slots_made(op), [views] if op.returns_one else views, strict=True))
            return ()
        result = op.results[0]
        assert result is not None
        if op.function in _IDENTITIES:
            self._representatives[result] = source
            return ()
        # Generated code repeats the recorded geometry. Gradients may have other strides in another call, and an
        # operator such as t_() changes the geometry of its argument.
        plain = (
            op.function.overloadpacket in _GEOMETRIC and not self._has_inplace_views and source not in self._gradients
        )
        same_dtype = self._slots[result].geometry[3] == self._slots[source].geometry[3]
        return self._merge_views(op, result, source) if plain and same_dtype else (op,)

    def _merge_views(self, op: OperatorCall, result: int, source: int) -> Sequence[Op]:
        """Return an operation that makes a view of the base of ``source``; none if the same view exists."""
        base, geometry = self._base.get(source, source), self._slots[result].geometry
        if geometry == self._slots[source].geometry:
            existing: int | None = source
        else:
            existing = self._views.get((base, geometry))
        if existing is not None:
            self._representatives[result] = existing
            return ()
        self._views[base, geometry] = result
        self._base[result] = base
        return (OperatorCall(op.line, AS_STRIDED, (Ref(base), *geometry[:3]), {}, [result], True),)

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.values[self.representative(value.slot)]
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._resolve, value))
        if isinstance(value, dict):
            return {key: self._resolve(each) for key, each in value.items()}
        return value

    # -- all operations -----------------------------------------------------------------------------------------------

    def _remove_unneeded(self, operations: Sequence[Op], outputs: Sequence[int]) -> list[Op]:
        """Return the operations that have an effect, or whose results are used."""
        # From the last operation to the first, so that the uses of a result are known before its operation.
        used = set(map(self.representative, outputs))
        kept: list[Op] = []
        for op in reversed(operations):
            effect = not isinstance(op, OperatorCall) or op.writes or op.draws
            if effect or any(self.representative(slot) in used for slot in slots_made(op)):
                used.update(map(self.representative, slots_read(op)))
                kept.append(op)
        return kept[::-1]
