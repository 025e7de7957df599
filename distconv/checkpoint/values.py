"""Plain values on their way to JSON and back: what it would change, or drop without a word, is kept or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

PAIRS = "distconv/pairs"
"""The only key of what stands for a mapping whose keys are not all texts, as those of a learning rate's milestones."""


def to_json(value: object, place: str) -> Any:
    """A copy of ``value`` that JSON can carry; ``place`` is where it is, for the error.

    Raises
    ------
    ValueError
        If it is nothing that comes back as it was, but for tuples, which come back as lists.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float)):
        if not math.isfinite(value):
            raise ValueError(f"{place} is {value}, for which JSON has no word; leave it out, or save a text")
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, (list, tuple)):
        return [to_json(each, f"{place}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, Mapping) and PAIRS not in value:
        copies = {key: to_json(each, f"{place}[{key!r}]") for key, each in value.items()}
        if all(isinstance(key, str) for key in copies):
            return copies
        return {PAIRS: [[to_json(key, f"a key of {place}"), each] for key, each in copies.items()]}
    raise ValueError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot carry; save numbers, "
        "texts, lists and dictionaries of them (.tolist() of an array or tensor, .state_dict() of a scheduler)"
    )


def from_json(value: Any) -> Any:
    """What :func:`to_json` made a copy of.

    Raises
    ------
    ValueError
        If it made no such thing.
    """
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if PAIRS not in value:
        return {key: from_json(each) for key, each in value.items()}
    pairs = value[PAIRS]
    if len(value) > 1 or not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise ValueError(f"{PAIRS!r} holds no pairs")
    try:
        return {_key(key): from_json(each) for key, each in pairs}
    except TypeError as error:
        raise ValueError(f"{PAIRS!r} holds a key that is none: {error}") from error


def _key(key: Any) -> Any:
    return tuple(map(_key, key)) if isinstance(key, list) else key
