"""A GPU that is not there: its streams do what they were given as late as they may, or as early, never otherwise.

Its tensors are memory of the CPU that holds no numbers (NaN, or 77) until the stream on which they are computed has got
there. A stream gets there when the host or another stream waits for it, or at once if it is ``early``; all do when this
rank has long done nothing else, because another rank's GPU may need them. Who reads before a wait that is missing reads
NaN; who writes too early is read. Memory that was freed is overwritten, in the order of the
stream on which it was made, as torch's allocator would give it to the next tensor there; of pinned memory when its
copies are done.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map, tree_map_only

DEVICE = torch.device("cuda", 0)
IDLE_S = 0.2
NOTHING = 77
"""Value of uninitialized integers."""

_CONSTRUCTORS = ("arange", "empty", "full", "ones", "zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "zeros_like")
_FROM_HOST = ("as_tensor", "tensor")

aten = torch.ops.aten


class Stream:
    """Work in the order in which it was given."""

    numbers = itertools.count(1)

    def __init__(self, device: torch.device | None = None, *, early: bool | None = None) -> None:
        self.gpu = LateGpu.running
        self.device = DEVICE
        self.early = self.gpu.sides_early if early is None else early
        self.cuda_stream = next(self.numbers)
        self.gpu.streams[self.cuda_stream] = self
        self._work: deque[Callable[[], None]] = deque()
        self.given = self.done = 0

    def give(self, work: Callable[[], None]) -> None:
        """Do ``work`` behind all that was given before."""
        with self.gpu.turn:
            self._work.append(work)
            self.given += 1
            if self.early:
                self.get_to(self.given)

    def get_to(self, end: int) -> None:
        """Do the first ``end`` things that were given."""
        with self.gpu.turn:
            while self.done < end:
                self.done += 1
                self._work.popleft()()

    def wait_event(self, event: Event) -> None:
        stream, end = event.stream, event.end
        assert stream is not None, "the event was not recorded"
        self.give(lambda: stream.get_to(end))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.host_waits += 1
        self.get_to(self.given)

    def query(self) -> bool:
        return self.done == self.given

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


class Event:
    """The end of what a stream had been given."""

    def __init__(self, **options: Any) -> None:
        self.stream: Stream | None = None
        self.end = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or LateGpu.running.stream
        self.end = self.stream.given

    def wait(self, stream: Stream | None = None) -> None:
        (stream or LateGpu.running.stream).wait_event(self)

    def synchronize(self) -> None:
        LateGpu.running.host_waits += 1
        if self.stream is not None:
            self.stream.get_to(self.end)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.end


class Memory:
    """A block of the allocator, of the stream on which it was made; gone when its last tensor is."""

    def __init__(self, block: torch.Tensor) -> None:
        gpu = LateGpu.running
        self.block, self.users = block, set[int]()
        gpu.kept.append(block)
        weakref.finalize(self, _freed, gpu, gpu.stream, block, self.users)


def _freed(gpu: LateGpu, stream: Stream, block: torch.Tensor, users: set[int]) -> None:
    # With record_stream the allocator gives the block to nobody before those streams are done with it.
    if gpu is LateGpu.running and users <= {stream.cuda_stream}:
        stream.give(lambda: _spoil(block))


def _spoil(block: torch.Tensor) -> None:
    block.fill_(torch.nan if block.is_floating_point() or block.is_complex() else block.dtype is torch.bool or NOTHING)


class LateTensor(torch.Tensor):
    """A tensor of the GPU."""

    memory: Memory
    values: torch.Tensor
    is_cuda = True  # type: ignore[assignment]
    device = DEVICE  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: torch.Tensor, memory: Memory) -> LateTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
        )
        made.values, made.memory = values, memory
        return made

    @staticmethod
    def of(like: torch.Tensor) -> LateTensor:
        """A new tensor in which nothing was written."""
        block = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        _spoil(block)
        return LateTensor(block.detach(), Memory(block))

    def __repr__(self, **options: Any) -> str:
        return f"LateTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.memory.users.add(stream.cuda_stream)

    def cpu(self, *more: Any) -> torch.Tensor:  # type: ignore[override]
        LateGpu.running.stream.synchronize()
        return self.values.clone()

    def cuda(self, *more: Any, **named: Any) -> torch.Tensor:  # type: ignore[override]
        return self

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        assert not non_blocking
        found = self.cpu() if device is not None and device.type == "cpu" else self
        return found if dtype is None or dtype == found.dtype else torch.Tensor.to(found, dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(func, args, kwargs or {})


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    gpu = LateGpu.running
    returns = func._schema.returns
    if returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write:
        return _view(func, args, kwargs)
    if func is aten.copy_.default:
        return _copied(*args)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if func._schema.is_mutable:
        if any(each.alias_info is None for each in returns):
            return gpu.at_once(func, args, kwargs)
        gpu.stream.give(_later(func, args, kwargs, None))
        return kwargs.get("out", args[0]) if returns else None
    try:
        shapes = func(*_on_meta(args), **_on_meta(kwargs))
    except (NotImplementedError, RuntimeError):
        return gpu.at_once(func, args, kwargs)
    made = tree_map_only(torch.Tensor, LateTensor.of, shapes)
    if "empty" not in func.__name__:
        gpu.stream.give(_later(func, args, kwargs, made))
    return made


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    memory = next(each.memory for each in args if isinstance(each, LateTensor))
    found = func(*_values(args), **_values(kwargs))
    return tree_map_only(torch.Tensor, lambda each: LateTensor(each, memory), found)


def _copied(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    gpu = LateGpu.running
    for each in (into, source):
        if not isinstance(each, LateTensor):
            gpu.note_use(each)
    to, of = _values((into, source))
    gpu.stream.give(lambda: to.copy_(of))
    if not non_blocking and not (isinstance(into, LateTensor) and isinstance(source, LateTensor)):
        gpu.stream.synchronize()
    return into


def _later(func: Any, args: Any, kwargs: Any, made: Any) -> Callable[[], None]:
    args, kwargs, made = _values(args, copied=True), _values(kwargs, copied=True), _values(made)

    def work() -> None:
        found = func(*args, **kwargs)
        if made is not None:
            tree_map(lambda into, value: into.copy_(value) if isinstance(into, torch.Tensor) else None, made, found)

    return work


def _values(tree: Any, copied: bool = False) -> Any:
    """``tree`` with the memory of its late tensors; ``copied``: and what tensors of the host hold now."""

    def values(each: torch.Tensor) -> torch.Tensor:
        if isinstance(each, LateTensor):
            return each.values
        return each.detach().clone() if copied else each

    return tree_map_only(torch.Tensor, values, tree)


def _on_meta(tree: Any) -> Any:
    def meta(each: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")

    return tree_map_only(torch.Tensor, meta, tree)


class LateGpu:
    """Stands in for CUDA while it runs; ``order`` says which streams are early: none, all but the main one, it."""

    ORDERS = ("late", "sides first", "main first")
    running: LateGpu | None = None

    def __init__(self, order: str) -> None:
        self.sides_early = order == "sides first"
        self.capturing = False
        self.host_waits = 0
        """How often the host waited until a stream had got somewhere."""
        self.streams: dict[int, Stream] = {}
        self.kept: list[torch.Tensor] = []
        self._pinned: dict[int, Stream] = {}
        self.turn = threading.RLock()
        LateGpu.running = self
        self.stream = Stream(early=order == "main first")

    def tensor(self, values: torch.Tensor) -> LateTensor:
        """A tensor that a kernel computes: it holds ``values`` when the current stream has got there."""
        made = LateTensor.of(values)
        self.stream.give(_later(aten.copy_.default, (made, values), {}, None))
        return made

    def at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of what the host waits for."""
        self.stream.synchronize()
        found = func(*_values(args), **_values(kwargs))
        return tree_map_only(torch.Tensor, lambda each: LateTensor(each, Memory(each)), found)

    def synchronize(self, device: Any = None) -> None:
        for stream in list(self.streams.values()):
            stream.synchronize()

    @contextlib.contextmanager
    def by_itself(self) -> Iterator[None]:
        """Go on while the host gives nothing: it may wait for a rank whose GPU waits for this one."""
        over = threading.Event()

        def watch() -> None:
            seen = -1
            while not over.wait(IDLE_S):
                given = sum(stream.given + stream.done for stream in list(self.streams.values()))
                if given == seen:
                    self.synchronize()
                seen = given

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    # Pinned memory.

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        block = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        _spoil(block)
        self.kept.append(block)
        made = torch.empty(0, dtype=like.dtype).set_(block.untyped_storage(), 0, block.shape, block.stride())
        weakref.finalize(made, self._unpinned, block)
        return made

    def note_use(self, tensor: torch.Tensor) -> None:
        """A copy on the current stream reads or writes ``tensor``, of the host."""
        self._pinned[tensor.untyped_storage().data_ptr()] = self.stream

    def _unpinned(self, block: torch.Tensor) -> None:
        stream = self._pinned.get(block.untyped_storage().data_ptr())
        if stream is None:
            _spoil(block)
        elif LateGpu.running is self:
            stream.give(lambda: _spoil(block))

    # What torch.cuda and torch's constructors do.

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": self.on,
            "current_stream": lambda device=None: self.stream,
            "current_device": lambda: 0,
            "device": lambda device: contextlib.nullcontext(),
            "get_device_properties": lambda device: self,
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": self.synchronize,
        }.items():
            patch.setattr(torch.cuda, name, value)
        for name in (*_CONSTRUCTORS, *_LIKE, *_FROM_HOST):
            patch.setattr(torch, name, self._constructor(name, getattr(torch, name)))

    uuid = "the late GPU"

    def _constructor(self, name: str, made_by_torch: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def constructor(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if device is None and not pin_memory:
                return made_by_torch(*args, **kwargs)
            if device is not None and torch.device(device).type not in ("cuda", "cpu"):
                return made_by_torch(*args, device=device, **kwargs)
            made = made_by_torch(*_values(args), device="cpu", **kwargs)
            if pin_memory:
                return self.pinned(made) if "empty" in name else self.pinned(made).copy_(made)
            if device is None or torch.device(device).type == "cpu":
                return made
            if "empty" in name:
                return LateTensor.of(made)
            late = self.tensor(made)
            if name in _FROM_HOST:
                self.stream.synchronize()
            return late

        return constructor
