"""Records a step below Python's dispatch: torch's operators on this rank's blocks, forward and backward.

The backward pass runs in the caller's thread, so the same mode sees it. Messages, sums and what looks at values are
told by :mod:`distconv.recording`. Memory that was there before and is written to is saved first and put back
afterwards.
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
from distconv.capture.entries import (
    Begin,
    Call,
    End,
    Kind,
    Operator,
    Post,
    Recording,
    Ref,
    Refusal,
    SetGenerator,
    Slot,
    Sum,
    Wait,
)
from distconv.capture.state import State
from distconv.process.call_stack import users_frame
from distconv.tensor import DistTensor

_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

_MOVE_STATISTICS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_update_stats",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    )
)
_STATISTICS = ("running_mean", "running_var")
"""Operators that change these arguments, though their schemas do not say so."""

_CONSTANT = torch.ops.aten.lift_fresh.default
_COPY = torch.ops.aten.clone.default
_INDEX = torch.ops.aten.index.Tensor
_AS_STRIDED = torch.ops.aten.as_strided.default


class Recorder(TorchDispatchMode):
    """A mode that records what is called while it is active, until it ends."""

    def __init__(self, state: State) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.paused = False
        self.went_back = False
        """Whether there has been a backward pass."""
        self._foreign: set[int] = set()
        """Memory that no entry has made, and of it what the recording holds."""
        self._held: set[int] = set()
        self._state = state
        self._slots: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._count = 0
        self._newest: dict[int, int] = {}
        """By storage the slot that saw it last."""
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """By storage what it held before."""
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._operations: dict[int, tuple[Any, Post | Sum]] = {}
        """By its id each message that is under way, and its entry."""
        self._numbers = count()
        """Of messages."""
        self._drawn: dict[int, torch.Tensor] = {}
        """By its id where a default generator stood after the last numbers that were seen to be drawn."""

    # -- slots --------------------------------------------------------------------------------------------------------

    def _storage(self, tensor: torch.Tensor) -> int:
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        return self._new_storage(tensor) if storage is None else storage[1]

    def _new_storage(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._count += 1
        # As long as this is kept, no other storage has its address.
        self._storages[storage._cdata] = StorageWeakRef(storage), self._count
        return self._count

    def _new(self, kind: Kind, tensor: torch.Tensor) -> int:
        geometry: tuple[Any, ...]
        if tensor.device.type not in ("cpu", "cuda"):
            self.refuse(f"a tensor on {tensor.device}: steps on CPUs and on CUDA's GPUs are captured")
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self.refuse(f"a tensor of layout {tensor.layout} and type {type(tensor).__name__}")
            storage, geometry = -1, (tuple(tensor.shape), tensor.dtype, tensor.device)
        else:
            storage = self._storage(tensor)
            geometry = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
        number = len(self.recording.slots)
        held = tensor if kind is Kind.HELD else None
        if kind is not Kind.MADE:
            self._foreign.add(storage)
        if kind is Kind.HELD:
            self._held.add(storage)
        self.recording.slots.append(Slot(kind, storage, geometry, held, tensor.numel() * tensor.element_size()))
        self._slots[id(tensor)] = weakref.ref(tensor), number
        self._newest[storage] = number
        return number

    def known(self, tensor: torch.Tensor) -> int | None:
        """The slot of ``tensor``, if it has one."""
        entry = self._slots.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def add_input(self, block: torch.Tensor) -> None:
        """Let ``block`` be the next argument."""
        slot = self.known(block)
        self.recording.inputs.append(self._new(Kind.INPUT, block) if slot is None else slot)
        if block.requires_grad:
            self._leaf(block)

    def slot(self, tensor: torch.Tensor) -> int:
        """The slot of ``tensor``; one that no entry has made was there before, or is a view that torch took unseen."""
        slot = self.known(tensor)
        if slot is not None:
            return slot
        if tensor.layout is torch.strided:
            storage = self._storages.get(tensor.untyped_storage()._cdata, (None, -1))[1]
            if storage != -1 and storage not in self._held and not self._state.has(tensor):
                return self._view_taken(tensor)
        if tensor.requires_grad:
            self._leaf(tensor)
        return self._new(Kind.HELD, tensor)

    def kind(self, tensor: torch.Tensor) -> Kind:
        """What kind of slot ``tensor`` has."""
        return self.recording.slots[self.slot(tensor)].kind

    def add_leaf(self, leaf: torch.Tensor) -> None:
        """The gradient of ``leaf`` is about to be looked at, or set, or added to."""
        self._state.add(leaf)

    def _leaf(self, tensor: torch.Tensor) -> None:
        if tensor.is_leaf:
            self.add_leaf(tensor)
        elif torch.is_grad_enabled() or tensor.grad_fn is not None:
            self.refuse("a tensor whose gradient flows out of the step: detach() it before")

    def _view_taken(self, tensor: torch.Tensor) -> int:
        """A slot for an alias that torch made without a call, as ``x.data`` does."""
        storage = self._storage(tensor)
        source = self._newest[storage]
        if self.recording.slots[source].geometry[3] != tensor.dtype:
            self.refuse("a view of another dtype that torch takes unseen")
        slot = self._new(Kind.MADE, tensor)
        place = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        self._note(Operator(self._line(), _AS_STRIDED, (Ref(source), *place), {}, [slot], True))
        return slot

    # -- entries ------------------------------------------------------------------------------------------------------

    def _line(self) -> str:
        frame = users_frame(sys._getframe(1))
        return f"{frame.f_code.co_filename}, line {frame.f_lineno}"

    def _note(self, entry: Any) -> None:
        self.recording.entries.append(entry)

    def refuse(self, reason: str, line: str = "") -> None:
        """Note that the step cannot be replayed, and why; it goes on, since other ranks may not know."""
        if not self.paused:
            self.recording.refusals.append(Refusal(reason, line or self._line()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self.paused or any(tensor.is_meta for tensor in tensors) or _on_meta(kwargs):
            return func(*args, **kwargs)
        self.went_back = self.went_back or torch._C._current_graph_task_id() != -1
        if any(isinstance(tensor, DistTensor) for tensor in tensors):
            with self:
                return DistTensor.__torch_dispatch__(func, types, args, kwargs)
        if not tensors and not any("Tensor" in str(returned.type) for returned in func._schema.returns):
            return func(*args, **kwargs)
        if func is _CONSTANT:
            return self._constant(*args)
        if func.namespace != "aten" or (any(tag in func.tags for tag in _VALUES) and not _by_numbers(func, tensors)):
            self.refuse(_reason(func))
        named = tree_map(lambda leaf: Ref(self.slot(leaf)) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        writes = self._written(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        default = self._before_drawing(tree_leaves((args, kwargs))) if draws else None
        result = func(*args, **kwargs)
        if default is not None:
            self._drawn[id(default)] = default.get_state()
        several = result if isinstance(result, (list, tuple)) else [result]
        results = [self._result(each) for each in several]
        args, kwargs = named
        one = several is not result
        self._note(Operator(self._line(), func, args, kwargs, results, one, frozenset(writes), draws))
        return result

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """What Python made of numbers, which is made anew in each replay: the step may write to it."""
        constant = self._new(Kind.CONSTANT, tensor)
        self.recording.slots[constant].value = tensor.clone()
        self._new_storage(tensor)
        slot = self._new(Kind.MADE, tensor)
        self._note(Operator(self._line(), _COPY, (Ref(constant),), {}, [slot], True))
        return tensor

    def _result(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        slot = self.known(value)
        return self._new(Kind.MADE, value) if slot is None else slot

    def _written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
        """Slots that ``func`` changes; what was in memory that is none of its own is saved."""
        slots = []
        for place, argument in enumerate(func._schema.arguments):
            moves = argument.name in _STATISTICS and func.overloadpacket in _MOVE_STATISTICS
            if moves or (argument.alias_info is not None and argument.alias_info.is_write):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        slots.append(self.slot(tensor))
                        self._save(tensor)
        return slots

    def _save(self, tensor: torch.Tensor) -> None:
        number = self._storage(tensor) if tensor.layout is torch.strided else -1
        if number in self._foreign and number not in self._saved and number != -1:
            storage = tensor.untyped_storage()
            with recording.paused():
                self._saved[number] = storage, storage.clone()

    # -- random numbers -----------------------------------------------------------------------------------------------

    def _keep_state(self, generator: torch.Generator) -> None:
        self._generators.setdefault(id(generator), (generator, generator.get_state()))

    def _before_drawing(self, leaves: Sequence[Any]) -> torch.Generator | None:
        """The default generator that numbers are about to be drawn from, if they are not from another one."""
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        default = None if generators else _default_generator(leaves)
        for generator in generators:
            self._keep_state(generator)
        if default is not None:
            self._keep_state(default)
            before = self._drawn.get(id(default))
            if before is not None and not torch.equal(default.get_state(), before):
                self.refuse("the random generator has been set by something that cannot be seen")
        return default

    def set_generator(self, state: torch.Tensor) -> None:
        """The default generator is about to be set to ``state``."""
        self._keep_state(torch.default_generator)
        self._note(SetGenerator(self._line(), self.slot(state)))
        self._drawn[id(torch.default_generator)] = state.clone()

    def seeded(self, function: Callable[[], object]) -> None:
        """Call ``function``, which seeds the default generator, now and in each replay."""
        self._keep_state(torch.default_generator)
        self.call(function, ())
        self._drawn[id(torch.default_generator)] = torch.default_generator.get_state()

    # -- distconv.recording -------------------------------------------------------------------------------------------

    def posted(
        self, exchange: Any, comm: Any, sends: Sequence[Any], receives: Sequence[Any], what: str, *, channel: Any
    ) -> None:
        """Messages (peer, tensor) have been posted, by MPI or a ``channel`` of process groups."""
        if self.paused:
            return
        out = [(peer, self.slot(tensor)) for peer, tensor in sends]
        into = [(peer, self.slot(tensor)) for peer, tensor in receives]
        for _, tensor in receives:
            self._save(tensor)
        self._start(exchange, Post(self._line(), next(self._numbers), comm, out, into, what, 0, channel))

    def reduced(self, reduction: Any, comm: Any, tensor: torch.Tensor, op: Any, what: str, *, channel: Any) -> None:
        """The sum of ``tensor`` has been started in its memory."""
        if self.paused:
            return
        slot = self.slot(tensor)
        self._save(tensor)
        self._start(reduction, Sum(self._line(), next(self._numbers), comm, slot, op, what, channel))

    def _start(self, operation: Any, entry: Post | Sum) -> None:
        self._operations[id(operation)] = operation, entry
        self._note(entry)

    def waited(self, operation: Any) -> None:
        """An exchange, or a reduction, is about to be waited for."""
        noted = self._operations.get(id(operation))
        if noted is not None and noted[0] is operation:
            self._note(Wait(self._line(), noted[1].number, tuple(noted[1].reads())))
            del self._operations[id(operation)]
        elif not self.paused:
            self.refuse("a message that was under way before the step")

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], launches: bool = False) -> Any:
        """Call ``function`` of ``tensors``, now and in each replay; ``launches``: it only gives work to a GPU."""
        args = tuple(self.slot(tensor) for tensor in tensors)
        with recording.paused():
            result = function(*tensors)
        several = [] if result is None else result if isinstance(result, (list, tuple)) else [result]
        results = [self._new(Kind.MADE, tensor) for tensor in several]
        if not self.paused:
            self._note(Call(self._line(), function, args, results, several is not result, launches))
        return result

    def branch(self, flag: torch.Tensor, body: Callable[[], None], changed: Sequence[torch.Tensor]) -> None:
        """Run ``body``, which changes ``changed`` in place, and undo it if ``flag`` is false."""
        self._note(Begin(self._line(), self.slot(flag)))
        with recording.paused():
            before = [tensor.clone() for tensor in changed]
        body()
        self._note(End(self._line()))
        with recording.paused():
            if not bool(flag):
                for tensor, values in zip(changed, before, strict=True):
                    tensor.copy_(values)

    def together(self, world: Any, body: Callable[[], Any]) -> Any:
        """Run ``body``, which may fail on some ranks."""
        self._note(Begin(self._line(), None, world))
        result = body()
        self._note(End(self._line()))
        return result

    def writes(self, tensor: torch.Tensor) -> int:
        """How many operators have written to the memory of ``tensor`` until now."""
        storage, slots = self._storage(tensor), self.recording.slots
        operators = (entry for entry in self.recording.entries if isinstance(entry, Operator))
        return sum(any(slots[slot].storage == storage for slot in each.writes) for each in operators)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    @property
    def written(self) -> list[torch.UntypedStorage]:
        """Memory that was there before and has been written to."""
        return [storage for storage, _ in self._saved.values()]

    def put_back(self) -> None:
        """Let memory and random generators be what they were."""
        for storage, values in self._saved.values():
            storage.copy_(values)
        for generator, state in self._generators.values():
            generator.set_state(state)

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that numbers have been drawn from."""
        return [generator for generator, _ in self._generators.values()]


def _default_generator(leaves: Sequence[Any]) -> torch.Generator:
    """That of the device on which a call with these arguments draws."""
    for leaf in leaves:
        device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(device, torch.device) and device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator: torch.Generator = torch.cuda.default_generators[index]
            return generator
    return torch.default_generator


def _on_meta(kwargs: dict[str, Any]) -> bool:
    """Whether a call makes a tensor without memory, by which shapes are found."""
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


def _by_numbers(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a call takes elements by their numbers, so that its shape follows from that of the indices."""
    return func is _INDEX and not any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])


def _reason(func: Any) -> str:
    if torch.Tag.dynamic_output_shape in func.tags:
        return f"{func.name()} gives a shape that follows from values"
    if func.namespace == "aten":
        return f"a value is read in Python ({func.name()}: item(), bool(), float(), print, a comparison)"
    return f"{func.name()} is none of torch's own operators, whose calls are recorded"
