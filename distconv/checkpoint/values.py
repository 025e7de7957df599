"""Plain values on their way to JSON and back: what it would change, or drop silently, is kept or rejected.

Tensors among them go to the checkpoint's tensors; JSON has their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

PAIRS = "distconv/pairs"
"""The only key of what stands for a mapping whose keys are not all texts, as those of a learning rate's milestones."""
NUMBER = "distconv/number"
"""The only key of what stands for a number that is not finite."""
TENSOR = "distconv/tensor"
"""The only key of what stands for a tensor; its value is the tensor's name."""
PREFIX = "values/"
"""How names of such tensors begin."""

_RESERVED = frozenset((PAIRS, NUMBER, TENSOR))
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class TensorName:
    """A tensor among values, before it is read."""

    name: str


def to_json(value: object, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A copy of ``value`` that JSON can carry; ``place`` is where it is, for the error.

    Tensors in it are added to ``tensors``, by the names that the copy has of them.

    Raises
    ------
    ValueError
        If it is nothing that comes back as it was, but for tuples, which come back as lists.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float)):
        if isinstance(value, int):
            return int(value)
        return float(value) if math.isfinite(value) else {NUMBER: str(float(value))}
    if isinstance(value, (list, tuple)):
        return [to_json(each, f"{place}[{index}]", tensors) for index, each in enumerate(value)]
    if isinstance(value, torch.Tensor):
        name = f"{PREFIX}{len(tensors)}"
        tensors[name] = value.detach()
        return {TENSOR: name}
    if isinstance(value, Mapping) and _RESERVED.isdisjoint(value):
        copies = {key: to_json(each, f"{place}[{key!r}]", tensors) for key, each in value.items()}
        if all(isinstance(key, str) for key in copies):
            return copies
        return {PAIRS: [[to_json(key, f"a key of {place}", tensors), each] for key, each in copies.items()]}
    raise ValueError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot carry; save numbers, "
        "texts, tensors, lists and dictionaries of them (.tolist() of an array, .state_dict() of a scheduler)"
    )


def from_json(value: Any) -> Any:
    """Return the values that :func:`to_json` has copied, with a :class:`TensorName` for each tensor.

    Raises
    ------
    ValueError
        If it made no such thing.
    """
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and value.keys() <= {NUMBER, TENSOR}:
        (kind, said), *_ = value.items()
        if kind == NUMBER and said in _NOT_FINITE:
            return _NOT_FINITE[said]
        if kind == TENSOR and isinstance(said, str) and said.startswith(PREFIX):
            return TensorName(said)
        raise ValueError(f"{kind!r} holds {said!r}")
    if PAIRS not in value:
        return {key: from_json(each) for key, each in value.items()}
    pairs = value[PAIRS]
    if len(value) > 1 or not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise ValueError(f"{PAIRS!r} holds no pairs")
    try:
        return {_key(key): from_json(each) for key, each in pairs}
    except TypeError as error:
        raise ValueError(f"{PAIRS!r} holds a key that is none: {error}") from error


def tensor_names(value: Any) -> Iterator[str]:
    """The names of all tensors in what :func:`from_json` returned."""
    if isinstance(value, TensorName):
        yield value.name
    for each in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from tensor_names(each)


def filled(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the values of :func:`from_json` with the tensors themselves."""
    if isinstance(value, TensorName):
        return tensors[value.name]
    if isinstance(value, list):
        return [filled(each, tensors) for each in value]
    return {key: filled(each, tensors) for key, each in value.items()} if isinstance(value, dict) else value


def _key(key: Any) -> Any:
    if isinstance(key, dict):
        key = from_json(key)
    return tuple(map(_key, key)) if isinstance(key, list) else key
