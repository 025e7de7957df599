"""Places outside of a step that it puts something into: attributes, variables, keys of dictionaries, lists.

A replay puts there what the step would have put: tensors of its own, and what else is the same each time. That is the
same only if the step does not depend on what is there, so it is recorded with other things in these places, too.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from distconv.capture.watch.names import names_in
from distconv.capture.watch.values import DEEP, EVERY_MODULES, HOOKS, LEAVES, MANY, OURS, is_ours, own_of, same

Key = tuple[int, Any]
"""Of a place: the id of what it is in, and what it is called there."""

_ABSENT, _FORGOTTEN, _ALL = object(), object(), object()
"""What is where nothing is, what nobody remembers; and the key of all that is in a list."""

_MAPPINGS = (dict, UserDict)


@dataclass(eq=False)
class Place:
    """A place, as it is called in Python, in ``holder`` under ``key``, and what was there ``before``."""

    name: str
    holder: Any
    key: Any
    before: Any
    free: bool = False
    """Whether the step does the same whatever is there."""

    @property
    def identity(self) -> Key:
        """The same for no other place."""
        return id(self.holder), self.key

    def now(self) -> Any:
        """What is there."""
        return _there(self.holder, self.key)

    def put(self, value: Any) -> None:
        """Let ``value`` be there."""
        holder, key = self.holder, self.key
        if key is _ALL:
            holder[:] = value
        elif isinstance(holder, CellType):
            if value is not _ABSENT:
                holder.cell_contents = value
            elif self.now() is not _ABSENT:
                del holder.cell_contents
        elif value is not _ABSENT:
            _setter(holder)(key, value)
        elif self.now() is not _ABSENT:
            _remover(holder)(key)

    def is_as_before(self) -> bool:
        """Whether there is what was there before."""
        now = self.now()
        if self.key is _ALL:
            return len(self.before) == len(now) and all(map(same, self.before, now))
        return same(self.before, now)

    def forget(self) -> None:
        """Hold what was there before no longer."""
        self.before = [_FORGOTTEN] if self.key is _ALL else _FORGOTTEN


def _there(holder: Any, key: Any) -> Any:
    if key is _ALL:
        return list(holder)
    if not isinstance(holder, CellType):
        return _inside(holder).get(key, _ABSENT)
    try:
        return holder.cell_contents
    except ValueError:
        return _ABSENT


def _inside(holder: Any) -> Mapping[Any, Any]:
    if isinstance(holder, _MAPPINGS):
        return holder
    return vars(holder) if isinstance(holder, (type, ModuleType)) else own_of(holder)


def _counting(holder: Any, names: AbstractSet[str] | None) -> dict[Any, Any]:
    """What is in it: keys, and attributes of ``names`` (None: all) apart from those of every module."""
    inside = _inside(holder)
    if isinstance(holder, _MAPPINGS):
        return dict(inside)
    left_out = EVERY_MODULES if isinstance(holder, torch.nn.Module) else ()
    return {key: each for key, each in inside.items() if (names is None or key in names) and key not in left_out}


def _setter(holder: Any) -> Callable[[Any, Any], None]:
    """What puts something into it, past what a user's class does with attributes."""
    if isinstance(holder, _MAPPINGS):
        return holder.__setitem__
    return partial((type if isinstance(holder, type) else _kind(holder)).__setattr__, holder)


def _remover(holder: Any) -> Callable[[Any], None]:
    if isinstance(holder, _MAPPINGS):
        return holder.__delitem__
    return partial((type if isinstance(holder, type) else _kind(holder)).__delattr__, holder)


def _kind(holder: Any) -> type:
    return ModuleType if isinstance(holder, ModuleType) else object


class Places:
    """All that there are in modules, and in and behind variables: as they are when they are added."""

    def __init__(self) -> None:
        self._single: list[Place] = []
        """Variables and lists."""
        self._keyed: list[tuple[str, Any, AbstractSet[str] | None, dict[Any, Any]]] = []
        """Names of what has attributes or keys, that, names that count, and what is in it."""
        self._seen: set[tuple[int, AbstractSet[str] | None]] = set()
        self._known: dict[int, Any] = {}
        """By its id all that was looked into, which stays what it is as long as it is held."""

    def add_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        """Attributes of users' modules, and what is in them."""
        for module in modules:
            if (id(module), None) not in self._seen:
                self._seen.add((id(module), None))
                name = type(module).__name__
                for hook in [each for hooks in HOOKS for each in (vars(module).get(hooks) or {}).values()]:
                    self._add(f"a hook of {name}", hook, None, DEEP)
                for key, value in self._keep(name, module, None).items():
                    self._add(f"{name}.{key}", value, None, DEEP)

    def add_variable(self, name: str, holder: Any, key: str, names: AbstractSet[str] | None, depth: int = DEEP) -> None:
        """A variable, and what is behind it: attributes of ``names`` (None: all), keys, elements."""
        value = _there(holder, key)
        self._single.append(Place(name, holder, key, value))
        self._add(name, value, names, depth)

    def add_frame(self, frame: FrameType) -> None:
        """What the code of a function that begins names: global variables, and what is behind those.

        What is behind its own variables counts if it is known; the rest may have been made in the step.
        """
        code, names = names_in(frame.f_code), _named_in(frame.f_code)
        for name in sorted(code.globals | code.globals_set):
            if name in frame.f_globals or name in code.globals_set:
                self.add_variable(name, frame.f_globals, name, names)
        for name, value in frame.f_locals.items():
            if id(value) in self._known:
                self._add(name, value, names, DEEP)

    def _keep(self, name: str, holder: Any, names: AbstractSet[str] | None) -> dict[Any, Any]:
        """What is in it now."""
        inside = _counting(holder, names)
        self._keyed.append((name, holder, names, inside))
        return inside

    def _add(self, name: str, value: Any, names: AbstractSet[str] | None, depth: int) -> None:
        function = isinstance(value, FunctionType) and not is_ours(value)
        if (isinstance(value, LEAVES) and not function) or not depth or (id(value), names) in self._seen:
            return
        self._seen.add((id(value), names))
        self._known[id(value)] = value
        if function:
            names = _named_in(value.__code__) | (names or frozenset())
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self.add_variable(key, cell, key, names, depth - 1)
        elif isinstance(value, (MethodType, partial)):
            owner = value.__self__ if isinstance(value, MethodType) else value.func
            self._add(name, owner, names, depth - 1)
        elif isinstance(value, (list, tuple)):
            if len(value) <= MANY:
                if isinstance(value, list):
                    self._single.append(Place(name, value, _ALL, list(value)))
                for number, each in enumerate(value):
                    self._add(f"{name}[{number}]", each, names, depth - 1)
        elif isinstance(value, _MAPPINGS):
            if len(value) <= MANY:
                for key, each in self._keep(name, value, names).items():
                    self._add(f"{name}[{key!r}]", each, names, depth - 1)
        elif isinstance(value, (type, ModuleType)):
            if names is not None and not _is_librarys(value):
                for key, each in self._keep(name, value, names).items():
                    self._add(f"{name}.{key}", each, names, depth - 1)
        elif not is_ours(type(value)):
            for key, each in self._keep(name, value, names).items():
                self._add(f"{name}.{key}", each, names, depth - 1)
            self._add(type(value).__name__, type(value), names, depth - 1)

    def changed(self) -> list[Place]:
        """Those in which something else is now."""
        found = [place for place in self._single if not place.is_as_before()]
        for name, holder, names, before in self._keyed:
            now = _counting(holder, names)
            for key in {**before, **now}:
                was = before.get(key, _ABSENT)
                if not same(was, now.get(key, _ABSENT)):
                    called = f"{name}[{key!r}]" if isinstance(holder, _MAPPINGS) else f"{name}.{key}"
                    found.append(Place(called, holder, key, was))
        first: dict[Key, Place] = {}
        for place in found:  # one that was added again later may have been changed before
            first.setdefault(place.identity, place)
        return list(first.values())

    def put_back(self) -> None:
        """Let be there what was."""
        for place in self.changed():
            place.put(place.before)


def _named_in(code: CodeType) -> AbstractSet[str]:
    """Attributes that it names."""
    names = names_in(code)
    return names.attributes | names.attributes_set | names.texts


def _is_librarys(value: Any) -> bool:
    return is_ours(value) if isinstance(value, type) else value.__name__.partition(".")[0] in OURS
