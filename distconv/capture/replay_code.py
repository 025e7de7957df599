"""Python code that is generated from a recording: a function in which each operation is a call.

:mod:`.buffer_plan` selects the memory of its tensors. A variable is deleted after its last use, so that memory is freed
as in the eager step. :mod:`.captured` calls the function, :mod:`.graph` captures it as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from distconv.capture.buffer_plan import MAX_MESSAGE_BYTES, WIDE_DTYPES, BufferPlan
from distconv.capture.messages import (
    AllReduceStart,
    ChannelStart,
    ExchangeStart,
    PersistentExchange,
    raise_on_all_ranks,
    wait_for_channel,
    wait_for_requests,
)
from distconv.capture.operations import (
    AllReduce,
    FunctionCall,
    Op,
    OperatorCall,
    Recording,
    Ref,
    SendReceive,
    TryOnAllRanks,
    WaitFor,
    slots_made,
    slots_read,
)
from distconv.communication.agreement import FAILURES

_aten = torch.ops.aten
_NEED_GRAD_MODE = (_aten.mkldnn_rnn_layer.default,)
"""Operators that compute less while gradients are disabled."""

_FAST_FUNCTIONS = {
    getattr(getattr(_aten, name), overload): getattr(torch.Tensor if name.endswith("_") else torch, name)
    for overload, names in {
        "Tensor": "add sub mul div add_ sub_ mul_ div_",
        "out": "add sub mul div cat stack",
        "default": "as_strided cat stack convolution relu native_batch_norm addcmul_ copy_ zero_ clamp_ rsqrt_",
    }.items()
    for name in names.split()
}
"""Functions of torch that call these operators, in half the time, since they parse their arguments in C++."""

_ARITHMETIC = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
    for overload in (("Tensor",) if name.endswith("_") else ("Tensor", "out"))
)
"""Operators that convert a Python number to a tensor in each call."""

ReplayFunction = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], tuple[torch.Tensor, ...]]
"""Function that replays a recording, given the blocks of the arguments and the gradients. It returns the outputs."""


class ReplayCode:
    """The generated function that replays a recording: ``replay``, with its source code in ``source``.

    Parameters
    ----------
    recording : Recording
        The recording.
    outputs : sequence of int
        Slots of the tensors that the function returns.
    gradients : dict of int to int
        For the slot of each gradient that exists before the step, its index among the gradients that are passed.
    count : int
        Number of gradients that are passed.
    """

    def __init__(self, recording: Recording, outputs: Sequence[int], gradients: dict[int, int], count: int) -> None:
        self._recording, self._outputs = recording, outputs
        plan = BufferPlan(recording, outputs, gradients)
        self._values, self._representative, self._operations = plan.values, plan.representative, plan.operations
        self._constants: dict[str, Any] = {}
        self._constant_names: dict[int, str] = {}
        """Names of the constants, by ``id``."""
        self._names = {slot: f"g{number}" for slot, number in gradients.items()}
        for index, slot in enumerate(recording.inputs):
            if slot is not None:
                self._names.setdefault(slot, f"a{index}")
        self._lines: list[str] = []
        self._indent = "    "
        self.requests = 0
        """Number of persistent MPI requests."""
        self.source, self.replay = self._compile(count)

    # -- names --------------------------------------------------------------------------------------------------------

    def _name(self, slot: int) -> str:
        slot = self._representative(slot)
        if slot in self._values:
            return self._constant(self._values[slot])
        return self._names.setdefault(slot, f"v{slot}")

    def _constant(self, value: Any) -> str:
        name = self._constant_names.get(id(value))
        if name is None:
            name = self._constant_names[id(value)] = f"c{len(self._constants)}"
            self._constants[name] = value
        return name

    def _expression(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self._name(value.slot)
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        if isinstance(value, (list, tuple)) and _has_refs(value):
            listed = ", ".join(map(self._expression, value))
            return f"[{listed}]" if isinstance(value, list) else f"({listed},)"
        return self._constant(value)

    # -- source -------------------------------------------------------------------------------------------------------

    def _emit(self, line: str) -> None:
        self._lines.append(self._indent + line)

    def _compile(self, gradients: int) -> tuple[str, ReplayFunction]:
        for letter, count in (("a", len(self._recording.inputs)), ("g", gradients)):
            if count:
                # The comma unpacks a sequence of one, too.
                self._emit(f"{', '.join(f'{letter}{i}' for i in range(count))}, = {letter.upper()}")
        last = self._last_uses()
        for number, op in enumerate(self._operations):
            self._write(op)
            if number in last:
                self._emit(f"del {', '.join(sorted(last[number]))}")
        self._emit(f"return ({''.join(f'{self._name(slot)}, ' for slot in self._outputs)})")
        # Constants are default arguments, because Python reads local variables faster than globals.
        defaults = ", ".join(f"{name}={name}" for name in self._constants)
        source = "\n".join([f"def replay(A, G, {defaults}):", *self._lines])
        scope = dict(self._constants)
        exec(compile(source, "<distconv replay>", "exec"), scope)
        return source, scope["replay"]

    def _last_uses(self) -> dict[int, set[str]]:
        """Return the variables that no later operation uses, by index of the operation."""
        last: dict[str, int] = {}
        # A wait uses the tensors of its messages, so their memory is kept until MPI has finished.
        for number, op in enumerate(self._operations):
            for slot in (*slots_read(op), *slots_made(op)):
                if slot not in self._values:
                    last[self._name(slot)] = number
        stay = {self._name(slot) for slot in self._outputs}
        uses: dict[int, set[str]] = {}
        for name, number in last.items():
            # Only variables of results: arguments, gradients and constants have references outside of the function.
            if name not in stay and name[0] == "v":
                uses.setdefault(number, set()).add(name)
        return uses

    def _write(self, op: Op) -> None:
        if isinstance(op, OperatorCall):
            bound = _FAST_FUNCTIONS.get(op.function, op.function._op)
            function = _with_grad_mode(op.function._op) if op.function in _NEED_GRAD_MODE else bound
            args = [self._expression(value) for value in self._arguments_of(op)]
            args += [f"{key}={self._expression(value)}" for key, value in op.kwargs.items()]
            # An operator that works in place returns its argument, which has a variable already.
            known = slots_read(op)
            self._write_call([None if slot in known else slot for slot in op.results], op.returns_one, function, args)
        elif isinstance(op, FunctionCall):
            self._write_call(op.results, op.returns_one, op.function, map(self._name, op.args))
        elif isinstance(op, SendReceive):
            self._write_post(op)
        elif isinstance(op, AllReduce) and op.channel is None:
            self._write_start(op, AllReduceStart(op.comm, op.mpi_op))
        elif isinstance(op, AllReduce):
            self._write_start(op, ChannelStart(op.channel, op.what, mpi_op=op.mpi_op))
        elif isinstance(op, WaitFor):
            self._emit(f"w{op.number}(q{op.number}, d{op.number})")
        elif isinstance(op, TryOnAllRanks):
            self._emit("failure = None")
            self._emit("try:")
            self._indent += "    "
            begin = len(self._lines)
            for each in op.operations:
                self._write(each)
            if len(self._lines) == begin:  # what was tried had no effect on tensors
                self._emit("pass")
            self._indent = self._indent[:-4]
            self._emit(f"except {self._constant(FAILURES)} as error: failure = error")
            self._emit(f"{self._constant(partial(raise_on_all_ranks, op.world))}(failure)")

    def _write_call(self, results: Sequence[int | None], one: bool, function: Any, args: Iterable[str]) -> None:
        names = ["_" if slot is None else self._name(slot) for slot in results]
        target = f"{', '.join(names)}{'' if one else ','} = " if any(slot is not None for slot in results) else ""
        self._emit(f"{target}{self._constant(function)}({', '.join(args)})")

    def _arguments_of(self, op: OperatorCall) -> Sequence[Any]:
        """Return the arguments of ``op``, with a tensor in place of a number that each call would convert."""
        if op.function not in _ARITHMETIC or not isinstance(op.args[0], Ref):
            return op.args
        first, second = op.args
        shape, *_, dtype, device = self._recording.slots[first.slot].geometry
        number = isinstance(second, (int, float)) and not isinstance(second, bool)
        if not number or not shape or dtype not in WIDE_DTYPES or device.type != "cpu":
            return op.args
        return first, torch.tensor(second, dtype=dtype)

    def _write_post(self, op: SendReceive) -> None:
        to, origins = [peer for peer, _ in op.sends], [peer for peer, _ in op.receives]
        small = all(self._recording.slots[slot].nbytes <= MAX_MESSAGE_BYTES for _, slot in op.sends)
        if op.channel is not None:
            self._write_start(op, ChannelStart(op.channel, op.what, to, origins))
        # Persistent requests need memory that is the same in each replay: that of all receives is kept.
        elif small and all(slot in self._values for _, slot in op.receives):
            receives = [(peer, self._values[slot]) for peer, slot in op.receives]
            sends = [(peer, self._persistent_buffer(slot)) for peer, slot in op.sends]
            persistent = PersistentExchange(op.comm, sends, receives, op.tag)
            self.requests += len(persistent.requests)
            self._write_start(op, persistent, [])
        else:
            self._write_start(op, ExchangeStart(op.comm, to, origins))

    def _write_start(self, op: SendReceive | AllReduce, function: Any, slots: Sequence[int] | None = None) -> None:
        number = op.number
        self._constants[f"d{number}"] = partial(_describe_wait, op)
        self._constants[f"w{number}"] = wait_for_requests if op.channel is None else wait_for_channel
        names = map(self._name, slots_read(op) if slots is None else slots)
        self._emit(f"q{number} = {self._constant(function)}({', '.join(names)})")

    def _persistent_buffer(self, slot: int) -> torch.Tensor:
        """Return memory that persists between replays: the tensor's own, or a buffer to which each replay copies it."""
        buffer = self._values.get(slot)
        if buffer is None:
            shape, _, _, dtype, device = self._recording.slots[slot].geometry
            buffer = torch.empty(shape, dtype=dtype, device=device)
            self._emit(f"{self._constant(_aten.copy_.default._op)}({self._constant(buffer)}, {self._name(slot)})")
        return buffer


def _with_grad_mode(function: Any) -> Any:
    def call(*args: Any) -> Any:
        with torch.enable_grad():
            return function(*args)

    return call


def _has_refs(value: Any) -> bool:
    return isinstance(value, Ref) or (isinstance(value, (list, tuple)) and any(map(_has_refs, value)))


def _describe_wait(op: SendReceive | AllReduce) -> str:
    """Return the description of a wait, for reports of the watchdog."""
    if isinstance(op, AllReduce):
        return f"{op.what} over {op.comm.size} ranks, in the replay of {op.line}"
    peers = sorted({peer for peer, _ in (*op.sends, *op.receives)})
    return f"{op.what} with peers {', '.join(map(str, peers))}, in the replay of {op.line}"
