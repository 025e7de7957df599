"""The dispatch mode that records a step: torch's operators on this rank's blocks, forward and backward.

The backward pass runs in the caller's thread, so the same mode records it. Communication, and functions that read
values, notify the recorder through :mod:`distconv.recording`. Memory that existed before the step is saved before it is
written to, so that :meth:`StepRecorder.restore` can undo the step. :mod:`.run` uses the recorder.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from distconv import recording
from distconv.capture.gradients import SavedGradients
from distconv.capture.operations import (
    AllReduce,
    FunctionCall,
    OperatorCall,
    Recording,
    Ref,
    SendReceive,
    Slot,
    SlotOrigin,
    TryOnAllRanks,
    WaitFor,
)
from distconv.process.call_stack import user_frame
from distconv.tensor import DistTensor

_aten = torch.ops.aten
_VALUE_DEPENDENT_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

_STATISTICS = ("running_mean", "running_var")
_CHANGE_STATISTICS = frozenset(
    getattr(_aten, name)
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    )
)
"""Operators that change ``_STATISTICS`` in place, which their schemas do not declare."""


class StepRecorder(TorchDispatchMode):
    """A dispatch mode that records the operators that are called while it is active.

    It implements :class:`distconv.recording.Recorder`.

    Parameters
    ----------
    gradients : SavedGradients
        Receives each leaf whose gradient the step uses or changes, before the use.
    """

    def __init__(self, gradients: SavedGradients) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.paused = False
        self.ran_backward = False
        """True once an operator of a backward pass was recorded. Otherwise results may require a backward pass."""
        self._gradients = gradients
        self._existing_storages: set[int] = set()
        """Storages that no operation has made."""
        self._held_storages: set[int] = set()
        """The subset of ``_existing_storages`` that the recording refers to."""
        self._slots: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Each tensor that has a slot, and the slot, by ``id``, which Python may reuse once the reference is dead."""
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        """Each storage that was numbered, and its number, by address."""
        self._last_slots: dict[int, int] = {}
        """The slot that was added last, by storage."""
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Memory of each storage that the step has written to, and a copy from before the first write, by storage."""
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """Each random generator that the step uses, and its state before the step, by ``id``."""
        self._pending: dict[int, tuple[Any, SendReceive | AllReduce]] = {}
        """Each exchange or reduction that has not been waited for, and its record, by ``id`` of the exchange."""
        self._numbers, self._storage_numbers = count(), count(1)

    # -- slots --------------------------------------------------------------------------------------------------------

    def _storage_number(self, tensor: torch.Tensor) -> int:
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return self._number_storage(tensor) if known is None else known[1]

    def _number_storage(self, tensor: torch.Tensor) -> int:
        storage, number = tensor.untyped_storage(), next(self._storage_numbers)
        # The storage itself is not kept alive: memory is freed during the recording as in the eager step.
        # While the weak reference exists, no other storage gets this address.
        self._storages[storage._cdata] = StorageWeakRef(storage), number
        return number

    def _add_slot(self, origin: SlotOrigin, tensor: torch.Tensor) -> int:
        geometry: tuple[Any, ...]
        if tensor.device.type not in ("cpu", "cuda"):
            self.mark_unsupported(f"a tensor is on {tensor.device}; only steps on CPUs and CUDA GPUs can be captured")
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self.mark_unsupported(
                f"a tensor with layout {tensor.layout} and type {type(tensor).__name__} cannot be recorded"
            )
            storage, geometry = -1, (tuple(tensor.shape), tensor.dtype, tensor.device)
        else:
            storage = self._storage_number(tensor)
            geometry = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
        number = len(self.recording.slots)
        if origin is not SlotOrigin.RESULT:
            self._existing_storages.add(storage)
        if origin is SlotOrigin.EXISTING:
            self._held_storages.add(storage)
        held = tensor if origin is SlotOrigin.EXISTING else None
        self.recording.slots.append(Slot(origin, storage, geometry, held, tensor.numel() * tensor.element_size()))
        self._slots[id(tensor)] = weakref.ref(tensor), number
        self._last_slots[storage] = number
        return number

    def _find_slot(self, tensor: torch.Tensor) -> int | None:
        known = self._slots.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def add_input(self, block: torch.Tensor | None) -> None:
        """Add the block of the next argument; None for an argument that is not a tensor."""
        slot = None if block is None else self._find_slot(block)
        if block is not None and slot is None:
            slot = self._add_slot(SlotOrigin.INPUT, block)
            if block.requires_grad:
                self._add_leaf(block)
        self.recording.inputs.append(slot)

    def slot_of(self, tensor: torch.Tensor) -> int:
        """Return the slot of a tensor, which is added if it has none.

        A tensor without a slot existed before the step, or is a view that torch made without an operator.
        """
        slot = self._find_slot(tensor)
        if slot is not None:
            return slot
        if tensor.layout is torch.strided:
            # Memory that is known and not held, but an unknown tensor: a view that torch made without an operator.
            # Tensors of held memory existed before the step, as this one may have.
            storage = self._storages.get(tensor.untyped_storage()._cdata, (None, -1))[1]
            if storage != -1 and storage not in self._held_storages and not self._gradients.contains(tensor):
                return self._add_view(tensor)
        if tensor.requires_grad:
            self._add_leaf(tensor)
        return self._add_slot(SlotOrigin.EXISTING, tensor)

    def _add_leaf(self, tensor: torch.Tensor) -> None:
        if tensor.is_leaf:
            self._gradients.add(tensor)
        elif torch.is_grad_enabled() or tensor.grad_fn is not None:
            self.mark_unsupported(
                "a tensor belongs to an autograd graph from outside the step. Call detach() on it before"
            )

    def _add_view(self, tensor: torch.Tensor) -> int:
        """Return a slot for a view that torch makes without an operator, as ``x.data`` does."""
        source = self._last_slots[self._storage_number(tensor)]
        # as_strided would reinterpret the strides as multiples of another element size.
        if self.recording.slots[source].geometry[3] != tensor.dtype:
            self.mark_unsupported("a view with another dtype is made without an operator of torch")
        slot = self._add_slot(SlotOrigin.RESULT, tensor)
        geometry = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        self._append(OperatorCall(self._line(), _aten.as_strided.default, (Ref(source), *geometry), {}, [slot], True))
        return slot

    # -- operations ---------------------------------------------------------------------------------------------------

    def _line(self) -> str:
        frame = user_frame(sys._getframe(1))
        return f"{frame.f_code.co_filename}, line {frame.f_lineno}"

    def _append(self, op: Any) -> None:
        self.recording.operations.append(op)

    def mark_unsupported(self, reason: str, line: str = "") -> None:
        """Record that the step is unsupported. The step continues: other ranks may not have the same reason.

        An error on this rank alone would leave the other ranks waiting for its messages.

        Parameters
        ----------
        reason : str
            The unsupported operation.
        line : str
            Its line in the user's script. Default: the line that is running.
        """
        if not self.paused:
            self.recording.unsupported.append(f"{line or self._line()}: {reason}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        # Tensors on meta have no memory. They only provide shapes.
        on_meta = device is not None and torch.device(device).type == "meta"
        if self.paused or on_meta or any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        self.ran_backward = self.ran_backward or torch._C._current_graph_task_id() != -1
        if any(isinstance(tensor, DistTensor) for tensor in tensors):
            # torch disables a mode while it dispatches. The operators on blocks must be recorded, so it is enabled
            # again.
            with self:
                return DistTensor.__torch_dispatch__(func, types, args, kwargs)
        if not tensors and not any("Tensor" in str(returned.type) for returned in func._schema.returns):
            return func(*args, **kwargs)
        if func is _aten.lift_fresh.default:
            return self._record_constant(*args)
        # Indexing with integers has the tag, too, but only masks determine the shape of the result by their values.
        takes_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
        depends_on_values = any(tag in func.tags for tag in _VALUE_DEPENDENT_TAGS) and (
            func is not _aten.index.Tensor or takes_mask
        )
        if func.namespace != "aten" or depends_on_values:
            self.mark_unsupported(_unsupported_reason(func))
        # Slots, memory and generators before the call, which may change values, geometry and random state.
        named = tree_map(
            lambda leaf: Ref(self.slot_of(leaf)) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        writes = self._save_written(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            self._save_generators(leaves)
        result = func(*args, **kwargs)
        one = not isinstance(result, (list, tuple))
        results = [self._slot_of_result(each) for each in ([result] if one else result)]
        self._append(OperatorCall(self._line(), func, named[0], named[1], results, one, frozenset(writes), draws))
        return result

    def _record_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that Python made from numbers. Each replay copies it, since the step may write to it."""
        constant = self._add_slot(SlotOrigin.CONSTANT, tensor)
        self.recording.slots[constant].tensor = tensor.clone()
        # Another number for the same memory: from here on it belongs to a result, of which nothing has to be saved.
        self._number_storage(tensor)
        made = self._add_slot(SlotOrigin.RESULT, tensor)
        self._append(OperatorCall(self._line(), _aten.clone.default, (Ref(constant),), {}, [made], True))
        return tensor

    def _slot_of_result(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        slot = self._find_slot(value)
        return self._add_slot(SlotOrigin.RESULT, value) if slot is None else slot

    def _save_written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
        """Return the slots that ``func`` changes in place, after saving memory that existed before the step."""
        slots = []
        for position, argument in enumerate(func._schema.arguments):
            # Statistics are optional arguments, and their schemas do not say that they are written.
            statistics = argument.name in _STATISTICS and func.overloadpacket in _CHANGE_STATISTICS
            if statistics or (argument.alias_info is not None and argument.alias_info.is_write):
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        slots.append(self.slot_of(tensor))
                        self._save_memory(tensor)
        return slots

    def _save_memory(self, tensor: torch.Tensor) -> None:
        number = self._storage_number(tensor) if tensor.layout is torch.strided else -1
        if number in self._existing_storages and number not in self._saved and number != -1:
            storage = tensor.untyped_storage()
            with recording.paused():
                # Once for each storage, before the first write. Views of it share the copy.
                self._saved[number] = storage, storage.clone()

    # -- random numbers -----------------------------------------------------------------------------------------------

    def save_generator(self, generator: torch.Generator) -> None:
        """Save the state of ``generator``. Call it before the step changes the state; later calls have no effect."""
        self._generators.setdefault(id(generator), (generator, generator.get_state()))

    def _save_generators(self, leaves: Sequence[Any]) -> None:
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        for generator in generators or [_default_generator(leaves)]:
            self.save_generator(generator)

    # -- reports through distconv.recording ---------------------------------------------------------------------------

    def record_exchange(
        self, exchange: Any, comm: Any, sends: Sequence[Any], receives: Sequence[Any], what: str, *, channel: Any
    ) -> None:
        """Record the start of an exchange.

        Parameters
        ----------
        exchange, comm, sends, receives, what, channel
            As in :meth:`distconv.recording.Recorder.record_exchange`.
        """
        if self.paused:
            return
        out = [(peer, self.slot_of(tensor)) for peer, tensor in sends]
        into = [(peer, self.slot_of(tensor)) for peer, tensor in receives]
        # MPI writes this memory without an operator, so it is saved here.
        for _, tensor in receives:
            self._save_memory(tensor)
        self._record_start(exchange, SendReceive(self._line(), next(self._numbers), comm, out, into, what, 0, channel))

    def record_reduction(
        self, reduction: Any, comm: Any, tensor: torch.Tensor, op: Any, what: str, *, channel: Any
    ) -> None:
        """Record the start of an in-place all-reduce.

        Parameters
        ----------
        reduction, comm, tensor, op, what, channel
            As in :meth:`distconv.recording.Recorder.record_reduction`.
        """
        if self.paused:
            return
        slot = self.slot_of(tensor)
        self._save_memory(tensor)
        self._record_start(reduction, AllReduce(self._line(), next(self._numbers), comm, slot, op, what, channel))

    def _record_start(self, handle: Any, op: SendReceive | AllReduce) -> None:
        self._pending[id(handle)] = handle, op
        self._append(op)

    def record_wait(self, operation: Any) -> None:
        """Record the wait for an exchange or a reduction."""
        pending = self._pending.get(id(operation))
        # Python may give the id of a freed exchange to another one.
        if pending is not None and pending[0] is operation:
            op = pending[1]
            slots = (op.slot,) if isinstance(op, AllReduce) else tuple(s for _, s in (*op.sends, *op.receives))
            self._append(WaitFor(self._line(), op.number, slots))
            del self._pending[id(operation)]
        elif not self.paused:
            self.mark_unsupported("the step waits for a message that was started before it")

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], launches: bool = False) -> Any:
        """Call a function, now and in each replay.

        Parameters
        ----------
        function, tensors, launches
            As in :meth:`distconv.recording.Recorder.call`.

        Returns
        -------
        object
            The result of ``function``.
        """
        args = tuple(self.slot_of(tensor) for tensor in tensors)
        with recording.paused():
            result = function(*tensors)
        several = [] if result is None else result if isinstance(result, (list, tuple)) else [result]
        results = [self._add_slot(SlotOrigin.RESULT, tensor) for tensor in several]
        if not self.paused:
            self._append(FunctionCall(self._line(), function, args, results, several is not result, launches))
        return result

    def try_on_all_ranks(self, world: Any, body: Callable[[], Any]) -> Any:
        """Call ``body``, and record its operations such that a failure in a replay raises on all ranks of ``world``.

        A failure during the recording itself raises on this rank alone, and the caller raises it on the others.

        Parameters
        ----------
        world, body
            As in :meth:`distconv.recording.Recorder.try_on_all_ranks`.

        Returns
        -------
        object
            The result of ``body``.
        """
        # Operations of the body go into a list of its own; the list outside continues afterwards.
        operations, self.recording.operations = self.recording.operations, []
        try:
            return body()
        finally:
            operations.append(TryOnAllRanks(self._line(), world, self.recording.operations))
            self.recording.operations = operations

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore the memory and the random generators that the step has changed."""
        # In place: other tensors, of the model and of the user, are views of this memory.
        for storage, values in self._saved.values():
            storage.copy_(values)
        for generator, state in self._generators.values():
            generator.set_state(state)

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators that the step has used or set."""
        return [generator for generator, _ in self._generators.values()]


def _default_generator(leaves: Sequence[Any]) -> torch.Generator:
    """Return the default random generator of the device of a call with these arguments."""
    for leaf in leaves:
        device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(device, torch.device) and device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator: torch.Generator = torch.cuda.default_generators[index]
            return generator
    return torch.default_generator


def _unsupported_reason(func: Any) -> str:
    if torch.Tag.dynamic_output_shape in func.tags:
        return f"{func.name()} returns a shape that depends on values"
    if func.namespace == "aten":
        return f"a value is read in Python ({func.name()}: item(), bool(), float(), print, a comparison)"
    return f"{func.name()} is not an operator of torch. Operators of other libraries cannot be recorded"
