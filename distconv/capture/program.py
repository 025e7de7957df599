"""A recording as straight-line Python: one function without a branch, in which each entry is a call.

Where its tensors lie is decided by :mod:`.placement`. A variable is deleted behind its last use, so that memory goes
when it would go in the eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from distconv.capture.entries import (
    Begin,
    Call,
    End,
    Entry,
    Operator,
    Post,
    Recording,
    Ref,
    Sum,
    Wait,
    makes,
    reads,
)
from distconv.capture.messages import FAILURES, Channelled, Persistent, Posting, Summing, join, raise_together, wait
from distconv.capture.placement import LARGEST_BUFFER, WIDE, Placement

_aten = torch.ops.aten
_ASK_FOR_GRADIENTS = (_aten.mkldnn_rnn_layer.default,)
"""Operators that make less where gradients are switched off."""

_BOUND = {
    getattr(getattr(_aten, name), overload): getattr(torch.Tensor if name.endswith("_") else torch, name)
    for overload, names in {
        "Tensor": "add sub mul div add_ sub_ mul_ div_",
        "out": "add sub mul div cat stack",
        "default": "as_strided cat stack convolution relu native_batch_norm addcmul_ copy_ zero_ clamp_ rsqrt_",
    }.items()
    for name in names.split()
}
"""Operators that torch's bindings for Python call, too, in about half the time: they read arguments themselves."""

_ARITHMETIC = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
    for overload in (("Tensor",) if name.endswith("_") else ("Tensor", "out"))
)
"""Operators that make a tensor of a number in each call, which one that is there already spares."""

Replay = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], tuple[torch.Tensor, ...]]
"""Results, given the blocks of arguments and the gradients that there are."""


class Program:
    """The function of ``recording`` that gives the tensors of ``outputs``.

    ``gradients``: slots of gradients that there are, and the number of each among those that are given.
    """

    def __init__(
        self, recording: Recording, outputs: Sequence[int], gradients: dict[int, int], gradients_given: int
    ) -> None:
        self._recording, self._outputs = recording, outputs
        self._constants: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._names: dict[int, str] = {}
        placement = Placement(recording, outputs, gradients)
        self._values, self._same, self._entries = placement.values, placement.same, placement.entries
        self._by_channel: set[int] = set()
        """Numbers of messages and sums that go by a channel of process groups."""
        self._lines: list[str] = []
        self._worlds: list[Any] = []
        """Communicators of the blocks that are open, in which a failure on one rank is one on all."""
        self._names.update((slot, f"g{number}") for slot, number in gradients.items())
        for place, given in enumerate(recording.inputs):
            if given is not None:
                self._names.setdefault(given, f"a{place}")
        self._arguments = len(recording.inputs)
        self._gradients = gradients_given
        self.requests = 0
        """Persistent ones."""
        self.replay = self._compiled()

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
        self._lines.append("    " * (1 + len(self._worlds)) + line)

    def _compiled(self) -> Replay:
        last = self._last_uses()
        for number, entry in enumerate(self._entries):
            self._write(entry)
            gone = sorted(last.get(number, ()))
            if gone:
                self._emit(f"del {', '.join(gone)}")
        results = ", ".join(self._name(slot) for slot in self._outputs)
        head = []
        for letter, count in (("a", self._arguments), ("g", self._gradients)):
            if count:
                head.append(f"    {', '.join(f'{letter}{i}' for i in range(count))}, = {letter.upper()}")
        defaults = ", ".join(f"{name}={name}" for name in self._constants)
        source = "\n".join(
            [f"def replay(A, G, {defaults}):", *head, *self._lines, f"    return ({results}{',' if results else ''})"]
        )
        scope = dict(self._constants)
        exec(compile(source, "<distconv replay>", "exec"), scope)
        self.source = source
        replay: Replay = scope["replay"]
        return replay

    def _last_uses(self) -> dict[int, set[str]]:
        """Return by the number of an entry the variables that no later entry uses."""
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
            function = self._constant(_BOUND.get(entry.function, entry.function._op))
            args = [self._text(value) for value in self._arguments_of(entry)]
            args += [f"{key}={self._text(value)}" for key, value in entry.kwargs.items()]
            if entry.function in _ASK_FOR_GRADIENTS:
                function = self._constant(_with_gradients(entry.function._op))
            results = [None if slot is None or slot in set(reads(entry)) else slot for slot in entry.results]
            self._emit(_assigned([self._variable(s) for s in results], entry.one) + f"{function}({', '.join(args)})")
        elif isinstance(entry, Call):
            args = [self._name(slot) for slot in entry.args]
            left = _assigned([self._variable(slot) for slot in entry.results], entry.one)
            self._emit(left + f"{self._constant(entry.function)}({', '.join(args)})")
        else:
            self._write_other(entry)

    def _arguments_of(self, entry: Operator) -> Sequence[Any]:
        """Those of ``entry``, with a tensor in place of a number that each call would make one of."""
        if entry.function not in _ARITHMETIC or not isinstance(entry.args[0], Ref):
            return entry.args
        first, second = entry.args
        shape, *_, dtype, device = self._recording.slots[first.slot].geometry
        number = isinstance(second, (int, float)) and not isinstance(second, bool)
        if not number or not shape or dtype not in WIDE or device.type != "cpu":
            return entry.args
        return first, torch.tensor(second, dtype=dtype)

    def _variable(self, slot: int | None) -> str:
        return "_" if slot is None else self._name(slot)

    def _write_other(self, entry: Entry) -> None:
        if isinstance(entry, Post):
            self._write_post(entry)
        elif isinstance(entry, Sum):
            if entry.channel is None:
                way: Any = Summing(entry.comm, entry.operation)
            else:
                way = Channelled(entry.channel, entry.what, operation=entry.operation)
            self._post(entry.number, way, [entry.slot], entry)
        elif isinstance(entry, Wait):
            function = join if entry.number in self._by_channel else wait
            self._emit(f"{self._constant(function)}(q{entry.number}, d{entry.number})")
        elif isinstance(entry, Begin):
            self._emit("failure = None")
            self._emit("try:")
            self._worlds.append(entry.world)
            self._emit("pass")
        elif isinstance(entry, End):
            raises = self._constant(partial(raise_together, self._worlds.pop()))
            self._emit(f"except {self._constant(FAILURES)} as error: failure = error")
            self._emit(f"{raises}(failure)")

    def _write_post(self, entry: Post) -> None:
        to, origins = [peer for peer, _ in entry.sends], [peer for peer, _ in entry.receives]
        if entry.channel is not None:
            self._post(entry.number, Channelled(entry.channel, entry.what, to, origins), list(reads(entry)), entry)
            return
        small = all(self._recording.slots[slot].nbytes <= LARGEST_BUFFER for _, slot in entry.sends)
        if small and all(slot in self._values for _, slot in entry.receives):
            receives = [(peer, self._values[slot]) for peer, slot in entry.receives]
            sends = [(peer, self._kept(slot)) for peer, slot in entry.sends]
            persistent = Persistent(entry.comm, sends, receives, entry.tag)
            self.requests += len(persistent.requests)
            self._post(entry.number, persistent, [], entry)
            return
        self._post(entry.number, Posting(entry.comm, to, origins), list(reads(entry)), entry)

    def _kept(self, slot: int) -> torch.Tensor:
        """Memory that stays for a message: where it lies, or else what it is copied to."""
        buffer = self._values.get(slot)
        if buffer is None:
            shape, _, _, dtype, device = self._recording.slots[slot].geometry
            buffer = torch.empty(shape, dtype=dtype, device=device)
            copy = self._constant(_aten.copy_.default._op)
            self._emit(f"{copy}({self._constant(buffer)}, {self._name(slot)})")
        return buffer

    def _post(self, number: int, function: Any, slots: Iterable[int], entry: Post | Sum) -> None:
        what = _description(entry)
        self._constants[f"d{number}"] = what
        if entry.channel is not None:
            self._by_channel.add(number)
        self._emit(f"q{number} = {self._constant(function)}({', '.join(map(self._name, slots))})")


def _with_gradients(function: Any) -> Any:
    def call(*args: Any) -> Any:
        with torch.enable_grad():
            return function(*args)

    return call


def _has_refs(value: Any) -> bool:
    return isinstance(value, Ref) or (isinstance(value, (list, tuple)) and any(map(_has_refs, value)))


def _assigned(names: Sequence[str], one: bool) -> str:
    if all(name == "_" for name in names):
        return ""
    return f"{names[0]} = " if one else f"{', '.join(names)}, = "


def _description(entry: Post | Sum) -> Callable[[], str]:
    if isinstance(entry, Sum):
        return lambda: f"{entry.what} over {entry.comm.size} ranks, in the replay of {entry.line}"
    peers = sorted({peer for peer, _ in (*entry.sends, *entry.receives)})
    text = f"{entry.what} with peers {', '.join(map(str, peers))}, in the replay of {entry.line}"
    return lambda: text
