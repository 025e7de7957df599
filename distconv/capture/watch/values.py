"""What is in containers and in objects of a user's, and whether it is what it was."""

from __future__ import annotations

import operator
import os
from collections import ChainMap, UserDict, deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.Size, torch.dtype, torch.device)
_MAPPINGS = (dict, UserDict, ChainMap, MappingProxyType, type(os.environ))
"""Others, such as files, may do work when they are looked into: of them attributes count, as of any object."""

_CONTAINERS = (list, tuple, set, frozenset, deque, bytearray)
OURS = ("torch", "distconv", "builtins")


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Attributes in which a module has its hooks."""

EVERY_MODULES = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""


def same(one: Any, other: Any) -> bool:
    """Whether a value is what it was: the same object, or an equal number, text or tuple of such."""
    if one is other:
        return True
    if isinstance(one, _Inside):
        return one.same(other)
    if isinstance(one, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and isinstance(one, PLAIN) and bool(one == other)


DEEP, MANY = 5, 1000
"""So far down what is in containers and objects is looked at, and of larger containers only how long they are."""

_LARGE = 1 << 20
"""Bytes; numbers in larger arrays of NumPy are not looked at."""

LEAVES = (*PLAIN, torch.Tensor, torch.nn.Module, FunctionType)
"""Nothing in them could change, or it is looked at elsewhere."""


@dataclass(eq=False)
class _Inside:
    """What is in a container or an object: keys, names of attributes, or how much, and values."""

    kind: type
    keys: Any
    values: tuple[Any, ...]

    def like(self, other: Any) -> bool:
        """Whether there is as much in ``other``, under the same keys."""
        alike = isinstance(other, _Inside) and self.kind is other.kind and same(self.keys, other.keys)
        return alike and len(self.values) == len(other.values)

    def same(self, other: Any) -> bool:
        """Whether the same is in ``other``."""
        return self.like(other) and all(map(same, self.values, other.values))

    def place(self, number: int) -> str:
        """Where a value is, as it is written in Python."""
        if not isinstance(self.keys, tuple):
            return f"[{number}]"
        return f"[{self.keys[number]!r}]" if issubclass(self.kind, _MAPPINGS) else f".{self.keys[number]}"


class Contents:
    """What is in containers and in objects of a user's: a value that :func:`same` finds the same as long as it is."""

    def __init__(
        self, names: AbstractSet[str] | None = None, without: AbstractSet[tuple[int, Any]] = frozenset()
    ) -> None:
        self._names = names
        """Attributes that count; all if None."""
        self._without, self._thinned = without, {here for here, _ in without}
        """Attributes, keys and lists that do not count, by where they are; and where some are."""

    def __call__(self, value: Any) -> Any:
        """What stands for ``value``: itself, where nothing is in it that could change."""
        return value if isinstance(value, LEAVES) else self._inside(value, DEEP, set())

    def _inside(self, value: Any, depth: int, seen: set[int]) -> Any:
        parts = None if isinstance(value, LEAVES) or not depth or id(value) in seen else self._parts(value)
        if parts is None:
            return value
        seen.add(id(value))
        keys, values = self._counting(value, *parts)
        found = tuple([self._inside(part, depth - 1, seen) for part in values])
        fixed = isinstance(value, tuple) and all(map(operator.is_, found, values))
        return value if fixed else _Inside(type(value), keys, found)

    def _counting(self, value: Any, keys: Any, values: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Those that count."""
        if id(value) not in self._thinned:
            return keys, values
        if not isinstance(keys, tuple):
            return (), ()
        kept = [(key, each) for key, each in zip(keys, values, strict=True) if (id(value), key) not in self._without]
        return tuple(key for key, _ in kept), [each for _, each in kept]

    def _parts(self, value: Any) -> tuple[Any, Sequence[Any]] | None:
        """Keys, or how many, and values."""
        if isinstance(value, (*_MAPPINGS, *_CONTAINERS)):
            if len(value) > MANY:
                return len(value), ()
            return (tuple(value), tuple(value.values())) if isinstance(value, _MAPPINGS) else (len(value), tuple(value))
        if isinstance(value, np.ndarray):
            return ((value.shape, value.dtype.str, value.tobytes()), ()) if value.nbytes <= _LARGE else None
        if isinstance(value, ContextVar):
            return ("get()",), [value.get(None)]
        if isinstance(value, partial):
            return ("func", "args", "keywords"), [value.func, value.args, value.keywords]
        if isinstance(value, MethodType):
            return ("__func__", "__self__"), [value.__func__, value.__self__]
        if self._names is None:
            attributes: Mapping[str, Any] = own_of(value) if is_plain_object(value) and not is_ours(type(value)) else {}
            return (tuple(attributes), tuple(attributes.values())) if attributes else None
        attributes = attributes_of(value)
        names = sorted(self._names & attributes.keys())
        return (tuple(names), [attributes[name] for name in names]) if names else None


def can_change(value: Any) -> bool:
    """Whether something may come to be in ``value``, of which nothing counts now."""
    return not isinstance(value, (*LEAVES, type, ModuleType, BuiltinFunctionType))


def changed(before: Any, now: Any, name: str) -> str:
    """What is not what it was in ``name``, of which both are the contents; empty if all is."""
    if same(before, now):
        return ""
    place, one, other = _first_difference(before, now, name)
    plain = isinstance(one, PLAIN) and isinstance(other, PLAIN)
    return f"{place} is not what it was" + (f" ({one!r} before, {other!r} now)" if plain else "")


def place_of_change(before: Any, now: Any, name: str) -> str:
    """Where in ``name``, of which both are the contents, is something else; empty if nowhere."""
    return "" if same(before, now) else _first_difference(before, now, name)[0]


def _first_difference(before: Any, now: Any, name: str) -> tuple[str, Any, Any]:
    """Its place, and what there was and is."""
    if isinstance(before, _Inside) and before.like(now):
        for number, (one, other) in enumerate(zip(before.values, now.values, strict=True)):
            if not same(one, other):
                return _first_difference(one, other, name + before.place(number))
    if isinstance(now, _Inside) and now.values and isinstance(now.keys, tuple):
        old = before.keys if isinstance(before, _Inside) and isinstance(before.keys, tuple) else ()
        for number, key in enumerate(now.keys):
            if not any(same(key, each) for each in old):
                return name + now.place(number), None, now
    return name, before, now


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Those of an object, a class or a module of a user's."""
    if isinstance(value, ModuleType):
        return {} if value.__name__.partition(".")[0] in OURS else vars(value)
    if isinstance(value, type):
        return ChainMap(*(vars(each) for each in value.__mro__ if not is_ours(each)))  # type: ignore[arg-type]
    if isinstance(value, (FunctionType, MethodType, torch.nn.Module, torch.Tensor)) or is_ours(type(value)):
        return {}
    return ChainMap(own_of(value), attributes_of(type(value)))  # type: ignore[arg-type]


def own_of(value: Any) -> Mapping[str, Any]:
    """Attributes that an object has now, those in slots included."""
    own: dict[str, Any] = getattr(value, "__dict__", {})
    slots = _Slots(value)
    return ChainMap(own, slots) if slots else own  # type: ignore[arg-type]


class _Slots(Mapping[str, Any]):
    """What is in the slots of an object."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._names = [name for kind in type(value).__mro__ for name in _slots_of(kind)]

    def __getitem__(self, name: str) -> Any:
        if name not in self._names or not hasattr(self._value, name):
            raise KeyError(name)
        return getattr(self._value, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._value, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _slots_of(kind: type) -> list[str]:
    if is_ours(kind):
        return []
    named = vars(kind).get("__slots__", ())
    names = [named] if isinstance(named, str) else list(named)
    private = f"_{kind.__name__.lstrip('_')}__"
    names = [private + name[2:] if name.startswith("__") and not name.endswith("__") else name for name in names]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def is_ours(what: Any) -> bool:
    """Whether a function or a class is torch's, Python's or of this package: those depend on nothing of a user's."""
    return (what.__module__ or "").partition(".")[0] in OURS


def is_plain_object(value: Any) -> bool:
    """Whether it is an object of a user's, whose attributes count."""
    left_out = (type, ModuleType, FunctionType, MethodType, torch.nn.Module, torch.Tensor)
    return not isinstance(value, left_out) and bool(own_of(value))
