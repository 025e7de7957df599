"""What is in values: in lists, tuples and mappings, and in objects of a user's; and whether it is what it was."""

from __future__ import annotations

import operator
from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset, deque)
OURS = ("torch", "distconv", "builtins")


def same(one: Any, other: Any) -> bool:
    """Whether a value is what it was: the same object, or an equal number, text or tuple of such."""
    if one is other:
        return True
    if isinstance(one, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and isinstance(one, PLAIN) and bool(one == other)


_DEEP, _MANY = 5, 1000
"""So far down what is in containers and objects is looked at, and of larger containers only how long they are."""


class Contents:
    """What is in containers and in objects of a user's: a value that :func:`same` finds the same as long as it is."""

    def __init__(self, names: AbstractSet[str] | None = None) -> None:
        self._names = names
        """Attributes that count; all if None."""
        self._seen: set[int] = set()

    def __call__(self, value: Any, depth: int = _DEEP) -> Any:
        """What stands for ``value``: itself, where nothing is in it that could change."""
        parts = self._parts(value) if depth and id(value) not in self._seen else None
        if parts is None:
            return value
        self._seen.add(id(value))
        found = tuple([self(part, depth - 1) for part in parts])
        fixed = isinstance(value, tuple) and all(map(operator.is_, found, parts))
        return value if fixed else (type(value), *found)

    def _parts(self, value: Any) -> Sequence[Any] | None:
        if isinstance(value, torch.Size):
            return None
        if isinstance(value, (Mapping, *_CONTAINERS)):
            if len(value) > _MANY:
                return [len(value)]
            return [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
        if self._names is None:
            attributes: Mapping[str, Any] = vars(value) if is_plain_object(value) and not is_ours(type(value)) else {}
            return [*attributes, *attributes.values()] or None
        attributes = attributes_of(value)
        names = sorted(self._names & attributes.keys())
        return [*names, *(attributes[name] for name in names)] or None


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Those of an object, a class or a module of a user's."""
    if isinstance(value, ModuleType):
        return {} if value.__name__.partition(".")[0] in OURS else vars(value)
    if isinstance(value, type):
        return ChainMap(*(vars(each) for each in value.__mro__ if not is_ours(each)))  # type: ignore[arg-type]
    if isinstance(value, (FunctionType, MethodType, torch.nn.Module, torch.Tensor)) or is_ours(type(value)):
        return {}
    return ChainMap(getattr(value, "__dict__", {}), attributes_of(type(value)))  # type: ignore[arg-type]


def is_ours(what: Any) -> bool:
    """Whether a function or a class is torch's, Python's or of this package: those depend on nothing of a user's."""
    return (what.__module__ or "").partition(".")[0] in OURS


def is_plain_object(value: Any) -> bool:
    """Whether it is an object of a user's, whose attributes count."""
    left_out = (type, ModuleType, FunctionType, MethodType, torch.nn.Module, torch.Tensor)
    return not isinstance(value, left_out) and bool(getattr(value, "__dict__", None))


def flattened(value: Any) -> Iterator[Any]:
    """What is in lists, tuples and mappings, in order."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for each in value:
            yield from flattened(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from flattened(each)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of everything in its lists, tuples and mappings."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        mapped_values = [mapped(function, each) for each in value]
        return type(value)(*mapped_values) if hasattr(value, "_fields") else type(value)(mapped_values)
    if isinstance(value, dict):
        return type(value)({key: mapped(function, each) for key, each in value.items()})
    return function(value)
