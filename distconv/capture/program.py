"""A recording as straight-line Python: one function without a branch, in which each entry is a call.

Left out is what nobody needs: calls whose results are not used, and those that return what they were given. A view of
memory that the recording holds is taken once, now. A variable is deleted behind its last use, so that memory goes when
it would go in the eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
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
    SetGenerator,
    Sum,
    Wait,
)
from distconv.capture.messages import Outcome, Persistent, Posting, Summing, wait

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
"""Operators that give their argument."""

_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
_PACKED = {_aten.cat.default: _aten.cat.out, _aten.clone.default: _aten.copy_.default}
"""Operators by which messages are packed, and what does the same into memory that is there."""

_LARGEST_BUFFER = 1 << 20
"""Bytes of memory for a message up to which it is kept between replays."""

_ASK_FOR_GRADIENTS = (_aten.mkldnn_rnn_layer.default,)
"""Operators that make less where gradients are switched off."""

_FAILURES = (OSError, LookupError, ValueError, RuntimeError, MemoryError)

Replay = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], tuple[torch.Tensor, ...]]
"""Results, given the blocks of arguments and the gradients that there are."""


class below_autograd(ExitStack):
    """Inside, calls arrive where they were recorded: below autograd and autocast."""

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
        self._values: dict[int, torch.Tensor] = {}
        """Of slots that are there now."""
        self._lines: list[str] = []
        self._depth = 1
        self._open: list[str | None] = []
        """Blocks that are being written: what learns of their failure, or None."""
        for number, slot in enumerate(recording.slots):
            if number in gradients:
                self._names[number] = f"g{gradients[number]}"
            elif slot.value is not None:
                self._values[number] = slot.value.detach()
        for place, given in enumerate(recording.inputs):
            if given is not None:
                self._names.setdefault(given, f"a{place}")
        self._arguments = len(recording.inputs)
        self._gradients = gradients_given
        self.requests = 0
        """Persistent ones."""
        self._entries = self._needed(self._thinned(self._with_buffers(recording.entries)))
        self.replay = self._compiled()

    # -- what is left out ---------------------------------------------------------------------------------------------

    def _with_buffers(self, entries: Sequence[Entry]) -> list[Entry]:
        """With memory that stays for messages: what is received into, and what is packed to be sent."""
        slots = self._recording.slots
        given = {slots[slot].storage for slot in self._outputs}
        posted = {slots[slot].storage for entry in entries if isinstance(entry, Post) for slot in entry.reads()}
        left: list[Entry] = []
        for entry in entries:
            made = entry.results[0] if isinstance(entry, Operator) and entry.one else None
            if made is not None and isinstance(entry, Operator) and self._stays(made, posted - given):
                if entry.function in _EMPTY:
                    self._values[made] = self._room(made)
                    continue
                if entry.function in _PACKED:
                    self._values[made] = self._room(made)
                    entry = _into(entry, made)
            left.append(entry)
        return left

    def _stays(self, number: int, storages: set[int]) -> bool:
        slot = self._recording.slots[number]
        return slot.storage in storages and slot.nbytes <= _LARGEST_BUFFER and number not in self._values

    def _room(self, number: int) -> torch.Tensor:
        shape, strides, offset, dtype, device = self._recording.slots[number].geometry
        extent = (
            offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if 0 not in shape else 0
        )
        return torch.empty(extent, dtype=dtype, device=device).as_strided(shape, strides, offset)

    def _thinned(self, entries: Sequence[Entry]) -> list[Entry]:
        """Without those that give what they were given, or a view of what is held."""
        left: list[Entry] = []
        for entry in entries:
            if isinstance(entry, Operator) and not entry.writes and entry.one and entry.results[0] is not None:
                result = entry.results[0]
                if entry.function in _SAME:
                    self._alias(result, next(entry.reads()))
                    continue
                if self._is_view_of_held(entry):
                    with torch.no_grad(), below_autograd():
                        self._values[result] = entry.function(*self._now(entry.args), **self._now(entry.kwargs))
                    continue
            left.append(entry)
        return left

    def _alias(self, result: int, source: int) -> None:
        if source in self._values:
            self._values[result] = self._values[source]
        else:
            self._names[result] = self._name(source)

    def _is_view_of_held(self, entry: Operator) -> bool:
        slots, sources = self._recording.slots, list(entry.reads())
        result = entry.results[0]
        assert result is not None
        return (
            bool(sources)
            and all(source in self._values for source in sources)
            and slots[result].storage == slots[sources[0]].storage
            and not entry.draws
        )

    def _now(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._values[value.slot]
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._now, value))
        if isinstance(value, dict):
            return {key: self._now(each) for key, each in value.items()}
        return value

    def _needed(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those that change something, or whose results are used."""
        used = {self._root(slot) for slot in self._outputs}
        left: list[Entry] = []
        for entry in reversed(entries):
            effect = not isinstance(entry, Operator) or entry.writes or entry.draws
            if effect or any(self._root(slot) in used for slot in entry.makes()):
                used.update(map(self._root, entry.reads()))
                left.append(entry)
        return left[::-1]

    # -- names --------------------------------------------------------------------------------------------------------

    def _name(self, slot: int) -> str:
        if slot in self._values:
            return self._constant(self._values[slot])
        return self._names.setdefault(slot, f"v{slot}")

    def _root(self, slot: int) -> str | int:
        """The same for slots of one tensor."""
        return slot if slot in self._values else self._name(slot)

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
        self._lines.append("    " * self._depth + line)

    def _compiled(self) -> Replay:
        last = self._last_uses()
        for number, entry in enumerate(self._entries):
            self._write(entry)
            if self._depth == 1:
                gone = sorted(last.pop(number, ()))
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
        found: Replay = scope["replay"]
        return found

    def _last_uses(self) -> dict[int, set[str]]:
        """By entry the variables that are used in it for the last time; in a block, at its end."""
        last: dict[str, int] = {}
        inside: set[str] = set()
        opened: list[tuple[int, bool]] = []
        for number, entry in enumerate(self._entries):
            if isinstance(entry, Begin):
                opened.append((number, entry.flag is not None))
            for slot in (*entry.reads(), *entry.makes()):
                if slot not in self._values:
                    last[self._name(slot)] = number
            if opened and opened[-1][1]:
                inside.update(self._name(slot) for slot in entry.makes() if slot not in self._values)
            if isinstance(entry, End):
                first, _ = opened.pop()
                for name, use in last.items():
                    if use >= first:
                        last[name] = number
        stay = {self._name(slot) for slot in self._outputs} | inside
        found: dict[int, set[str]] = {}
        for name, number in last.items():
            if name not in stay and name[0] == "v":
                found.setdefault(number, set()).add(name)
        return found

    def _write(self, entry: Entry) -> None:
        if isinstance(entry, Operator):
            function = self._constant(entry.function._op)
            args = [self._text(value) for value in entry.args]
            args += [f"{key}={self._text(value)}" for key, value in entry.kwargs.items()]
            if entry.function in _ASK_FOR_GRADIENTS:
                function = self._constant(_with_gradients(entry.function._op))
            made = [None if slot is None or slot in set(entry.reads()) else slot for slot in entry.results]
            self._emit(_assigned([self._variable(s) for s in made], entry.one) + f"{function}({', '.join(args)})")
        elif isinstance(entry, Call):
            args = [self._name(slot) for slot in entry.args]
            left = _assigned([self._variable(slot) for slot in entry.results], entry.one)
            self._emit(left + f"{self._constant(entry.function)}({', '.join(args)})")
        else:
            self._write_other(entry)

    def _variable(self, slot: int | None) -> str:
        return "_" if slot is None else self._name(slot)

    def _write_other(self, entry: Entry) -> None:
        if isinstance(entry, Post):
            self._write_post(entry)
        elif isinstance(entry, Sum):
            self._post(entry.number, Summing(entry.comm, entry.operation), [entry.slot], entry)
        elif isinstance(entry, Wait):
            self._emit(f"{self._constant(wait)}(q{entry.number}, d{entry.number})")
        elif isinstance(entry, SetGenerator):
            put = self._constant(torch.default_generator.set_state)
            self._emit(f"{put}({self._name(entry.slot)})")
        elif isinstance(entry, Begin):
            self._begin(entry)
        elif isinstance(entry, End):
            self._depth -= 1
            self._close()

    def _write_post(self, entry: Post) -> None:
        small = all(self._recording.slots[slot].nbytes <= _LARGEST_BUFFER for _, slot in entry.sends)
        if small and all(slot in self._values for _, slot in entry.receives):
            receives = [(peer, self._values[slot]) for peer, slot in entry.receives]
            persistent = Persistent(entry.comm, [(peer, self._kept(slot)) for peer, slot in entry.sends], receives)
            self.requests += len(persistent.requests)
            self._post(entry.number, persistent, [], entry)
            return
        posting = Posting(entry.comm, [peer for peer, _ in entry.sends], [peer for peer, _ in entry.receives])
        self._post(entry.number, posting, list(entry.reads()), entry)

    def _kept(self, slot: int) -> torch.Tensor:
        """Memory that stays for a message: where it lies, or else what it is copied to."""
        found = self._values.get(slot)
        if found is None:
            shape, _, _, dtype, device = self._recording.slots[slot].geometry
            found = torch.empty(shape, dtype=dtype, device=device)
            copy = self._constant(_aten.copy_.default._op)
            self._emit(f"{copy}({self._constant(found)}, {self._name(slot)})")
        return found

    def _post(self, number: int, function: Any, slots: Iterable[int], entry: Post | Sum) -> None:
        what = _description(entry)
        self._constants[f"d{number}"] = what
        self._emit(f"q{number} = {self._constant(function)}({', '.join(map(self._name, slots))})")

    def _begin(self, entry: Begin) -> None:
        if entry.flag is not None:
            self._open.append(None)
            self._emit(f"if {self._name(entry.flag)}:")
        else:
            self._open.append(self._constant(Outcome(entry.world)))
            self._emit("failure = None")
            self._emit("try:")
        self._depth += 1
        self._emit("pass")

    def _close(self) -> None:
        outcome = self._open.pop()
        if outcome is not None:
            self._emit(f"except {self._constant(_FAILURES)} as error: failure = error")
            self._emit(f"{outcome}(failure)")


def _into(entry: Operator, made: int) -> Operator:
    """``entry``, which packs, into the memory of its result."""
    function, writes = _PACKED[entry.function], frozenset([made])
    if entry.function is _aten.cat.default:
        return Operator(entry.line, function, entry.args, {**entry.kwargs, "out": Ref(made)}, [made], True, writes)
    return Operator(entry.line, function, (Ref(made), entry.args[0]), {}, [made], True, writes)


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
