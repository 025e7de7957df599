"""Python code that is generated from a recording: one function without branches, in which each entry is a call.

:mod:`.placement` selects the memory of its tensors. A variable is deleted after its last use, so that memory is freed
as in the eager step. :mod:`.captured` calls the function, :mod:`.graph` captures it as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from distconv.capture.entries import Call, Entry, Operator, Post, Recording, Ref, Sum, Together, Wait, makes, reads
from distconv.capture.messages import FAILURES, Channelled, Persistent, Posting, Summing, join, raise_together, wait
from distconv.capture.placement import LARGEST_BUFFER, WIDE, Placement

_aten = torch.ops.aten
_NEED_GRAD_MODE = (_aten.mkldnn_rnn_layer.default,)
"""Operators that compute less while gradients are disabled."""

_BOUND = {
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

Replay = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], tuple[torch.Tensor, ...]]
"""Function that replays a recording, given blocks of arguments and gradients. It returns the outputs."""


class Program:
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
        placement = Placement(recording, outputs, gradients)
        self._values, self._same, self._entries = placement.values, placement.same, placement.entries
        self._constants: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        """Names of the constants, by ``id``."""
        self._names = {slot: f"g{number}" for slot, number in gradients.items()}
        for place, given in enumerate(recording.inputs):
            if given is not None:
                self._names.setdefault(given, f"a{place}")
        self._lines: list[str] = []
        self._indent = "    "
        self.requests = 0
        """Number of persistent MPI requests."""
        self.source, self.replay = self._compiled(count)

    # -- names --------------------------------------------------------------------------------------------------------

    def _name(self, slot: int) -> str:
        slot = self._same(slot)
        if slot in self._values:
            return self._constant(self._values[slot])
        return self._names.setdefault(slot, f"v{slot}")

    def _constant(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"c{len(self._constants)}"
            self._constants[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self._name(value.slot)
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        if isinstance(value, (list, tuple)) and _has_refs(value):
            listed = ", ".join(map(self._text, value))
            return f"[{listed}]" if isinstance(value, list) else f"({listed},)"
        return self._constant(value)

    # -- source -------------------------------------------------------------------------------------------------------

    def _emit(self, line: str) -> None:
        self._lines.append(self._indent + line)

    def _compiled(self, gradients: int) -> tuple[str, Replay]:
        for letter, count in (("a", len(self._recording.inputs)), ("g", gradients)):
            if count:
                self._emit(f"{', '.join(f'{letter}{i}' for i in range(count))}, = {letter.upper()}")
        last = self._last_uses()
        for number, entry in enumerate(self._entries):
            self._write(entry)
            if number in last:
                self._emit(f"del {', '.join(sorted(last[number]))}")
        self._emit(f"return ({''.join(f'{self._name(slot)}, ' for slot in self._outputs)})")
        defaults = ", ".join(f"{name}={name}" for name in self._constants)
        source = "\n".join([f"def replay(A, G, {defaults}):", *self._lines])
        scope = dict(self._constants)
        exec(compile(source, "<distconv replay>", "exec"), scope)
        return source, scope["replay"]

    def _last_uses(self) -> dict[int, set[str]]:
        """Return the variables that no later entry uses, by index of the entry."""
        last: dict[str, int] = {}
        for number, entry in enumerate(self._entries):
            for slot in (*reads(entry), *makes(entry)):
                if slot not in self._values:
                    last[self._name(slot)] = number
        stay = {self._name(slot) for slot in self._outputs}
        uses: dict[int, set[str]] = {}
        for name, number in last.items():
            if name not in stay and name[0] == "v":
                uses.setdefault(number, set()).add(name)
        return uses

    def _write(self, entry: Entry) -> None:
        if isinstance(entry, Operator):
            bound = _BOUND.get(entry.function, entry.function._op)
            function = _with_grad_mode(entry.function._op) if entry.function in _NEED_GRAD_MODE else bound
            args = [self._text(value) for value in self._arguments_of(entry)]
            args += [f"{key}={self._text(value)}" for key, value in entry.kwargs.items()]
            known = reads(entry)
            self._write_call([None if slot in known else slot for slot in entry.results], entry.one, function, args)
        elif isinstance(entry, Call):
            self._write_call(entry.results, entry.one, entry.function, map(self._name, entry.args))
        elif isinstance(entry, Post):
            self._write_post(entry)
        elif isinstance(entry, Sum) and entry.channel is None:
            self._write_start(entry, Summing(entry.comm, entry.operation))
        elif isinstance(entry, Sum):
            self._write_start(entry, Channelled(entry.channel, entry.what, operation=entry.operation))
        elif isinstance(entry, Wait):
            self._emit(f"w{entry.number}(q{entry.number}, d{entry.number})")
        elif isinstance(entry, Together):
            self._emit("failure = None")
            self._emit("try:")
            self._indent += "    "
            for each in entry.entries:
                self._write(each)
            self._indent = self._indent[:-4]
            self._emit(f"except {self._constant(FAILURES)} as error: failure = error")
            self._emit(f"{self._constant(partial(raise_together, entry.world))}(failure)")

    def _write_call(self, results: Sequence[int | None], one: bool, function: Any, args: Iterable[str]) -> None:
        names = ["_" if slot is None else self._name(slot) for slot in results]
        target = f"{', '.join(names)}{'' if one else ','} = " if any(slot is not None for slot in results) else ""
        self._emit(f"{target}{self._constant(function)}({', '.join(args)})")

    def _arguments_of(self, entry: Operator) -> Sequence[Any]:
        """Return the arguments of ``entry``, with a tensor in place of a number that each call would convert."""
        if entry.function not in _ARITHMETIC or not isinstance(entry.args[0], Ref):
            return entry.args
        first, second = entry.args
        shape, *_, dtype, device = self._recording.slots[first.slot].geometry
        number = isinstance(second, (int, float)) and not isinstance(second, bool)
        if not number or not shape or dtype not in WIDE or device.type != "cpu":
            return entry.args
        return first, torch.tensor(second, dtype=dtype)

    def _write_post(self, entry: Post) -> None:
        to, origins = [peer for peer, _ in entry.sends], [peer for peer, _ in entry.receives]
        small = all(self._recording.slots[slot].nbytes <= LARGEST_BUFFER for _, slot in entry.sends)
        if entry.channel is not None:
            self._write_start(entry, Channelled(entry.channel, entry.what, to, origins))
        elif small and all(slot in self._values for _, slot in entry.receives):
            receives = [(peer, self._values[slot]) for peer, slot in entry.receives]
            sends = [(peer, self._kept(slot)) for peer, slot in entry.sends]
            persistent = Persistent(entry.comm, sends, receives, entry.tag)
            self.requests += len(persistent.requests)
            self._write_start(entry, persistent, [])
        else:
            self._write_start(entry, Posting(entry.comm, to, origins))

    def _write_start(self, entry: Post | Sum, function: Any, slots: Sequence[int] | None = None) -> None:
        number = entry.number
        self._constants[f"d{number}"] = partial(_description, entry)
        self._constants[f"w{number}"] = wait if entry.channel is None else join
        names = map(self._name, reads(entry) if slots is None else slots)
        self._emit(f"q{number} = {self._constant(function)}({', '.join(names)})")

    def _kept(self, slot: int) -> torch.Tensor:
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


def _description(entry: Post | Sum) -> str:
    """Return the description of a wait, for reports of the watchdog."""
    if isinstance(entry, Sum):
        return f"{entry.what} over {entry.comm.size} ranks, in the replay of {entry.line}"
    peers = sorted({peer for peer, _ in (*entry.sends, *entry.receives)})
    return f"{entry.what} with peers {', '.join(map(str, peers))}, in the replay of {entry.line}"
