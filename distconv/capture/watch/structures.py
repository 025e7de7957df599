"""Lists, tuples, dictionaries and dataclasses: tensors in them are arguments and results of a step."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from distconv.capture.watch.values import is_ours


def opened(value: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """What a list, tuple, dictionary or dataclass is, and what is in it, in order; None for all else.

    Other objects are not opened: nobody knows how they are made.
    """
    kind = type(value)
    if isinstance(value, (list, tuple, deque)) and kind is not torch.Size:
        return (kind, len(value)), list(value)
    if isinstance(value, (dict, UserDict)):
        return (kind, *value.keys()), list(value.values())
    if is_dataclass(value) and not isinstance(value, type) and not is_ours(kind):
        names = [each.name for each in fields(value) if hasattr(value, each.name)]
        return (kind, *names), [getattr(value, name) for name in names]
    return None


def _closed(value: Any, what: tuple[Any, ...], parts: list[Any]) -> Any:
    """One like ``value``, which is opened as ``what``, with other ``parts``."""
    kind = type(value)
    if isinstance(value, tuple):
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    if kind in (list, dict):
        return parts if kind is list else dict(zip(what[1:], parts, strict=True))
    new = copy.copy(value)  # with what else it has: a default's factory, a longest length, attributes
    if isinstance(value, (list, deque)):
        new.clear()
        new.extend(parts)
        return new
    for name, part in zip(what[1:], parts, strict=True):
        if isinstance(value, (dict, UserDict)):
            new[name] = part
        else:
            object.__setattr__(new, name, part)  # frozen ones, too
    return new


def structure(value: Any) -> Any:
    """What there is of lists, tuples, dictionaries and dataclasses in ``value``, and their keys."""
    inside = opened(value)
    return None if inside is None else (*inside[0], *map(structure, inside[1]))


def flattened(value: Any) -> Iterator[Any]:
    """What is in lists, tuples, dictionaries and dataclasses, in order."""
    inside = opened(value)
    if inside is None:
        yield value
    else:
        for each in inside[1]:
            yield from flattened(each)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of everything in its lists, tuples, dictionaries and dataclasses."""
    inside = opened(value)
    if inside is None:
        return function(value)
    return _closed(value, inside[0], [mapped(function, each) for each in inside[1]])
