"""Conversion of plain values to JSON and back: what JSON would change or drop silently is encoded or rejected.

Tensors among the values are stored with the checkpoint's tensors; JSON holds their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

PAIRS = "distconv/pairs"
"""Only key of the object that encodes a mapping with keys other than strings, as a learning rate's milestones."""
NUMBER = "distconv/number"
"""Only key of the object that encodes a number that is not finite."""
TENSOR = "distconv/tensor"
"""Only key of the object that encodes a tensor; its value is the tensor's name."""
PREFIX = "values/"
"""Prefix of the names of such tensors."""

_RESERVED = frozenset((PAIRS, NUMBER, TENSOR))
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class TensorName:
    """A placeholder for a tensor among values that has not been read yet."""

    name: str


def to_json(value: object, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a copy of ``value`` that JSON can represent.

    Parameters
    ----------
    value : object
        None, numbers, strings, tensors, and lists, tuples and mappings of them.
    place : str
        Name of the value, for the error.
    tensors : dict of str to Tensor
        Tensors in ``value`` are added to it, under the names that the copy has for them.

    Returns
    -------
    object
        The copy. Tuples become lists.

    Raises
    ------
    ValueError
        If :func:`from_json` could not restore the value.
    """
    # bool before int, of which it is a subclass.
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float)):
        if isinstance(value, int):
            # A plain int or float, also of a subclass such as an enumeration or a NumPy number.
            return int(value)
        return float(value) if math.isfinite(value) else {NUMBER: str(float(value))}
    if isinstance(value, (list, tuple)):
        return [to_json(each, f"{place}[{index}]", tensors) for index, each in enumerate(value)]
    if isinstance(value, torch.Tensor):
        name = f"{PREFIX}{len(tensors)}"
        tensors[name] = value.detach()
        return {TENSOR: name}
    if isinstance(value, Mapping) and _RESERVED.isdisjoint(value):
        # JSON turns other keys into strings silently, so a mapping with any is stored as pairs.
        copies = {key: to_json(each, f"{place}[{key!r}]", tensors) for key, each in value.items()}
        if all(isinstance(key, str) for key in copies):
            return copies
        return {PAIRS: [[to_json(key, f"a key of {place}", tensors), each] for key, each in copies.items()]}
    raise ValueError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot represent. Save numbers, "
        "strings, tensors, lists and dictionaries of them (.tolist() of an array, .state_dict() of a scheduler)."
    )


def from_json(value: Any) -> Any:
    """Return the values that :func:`to_json` encoded, with a :class:`TensorName` for each tensor.

    Raises
    ------
    ValueError
        If ``value`` is not a result of :func:`to_json`.
    """
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and value.keys() <= {NUMBER, TENSOR}:
        (kind, said), *_ = value.items()
        if kind == NUMBER and said in _NOT_FINITE:
            return _NOT_FINITE[said]
        # Without the prefix a manifest could insert tensors of the model into the values.
        if kind == TENSOR and isinstance(said, str) and said.startswith(PREFIX):
            return TensorName(said)
        raise ValueError(f"{kind!r} holds {said!r}")
    if PAIRS not in value:
        return {key: from_json(each) for key, each in value.items()}
    pairs = value[PAIRS]
    if len(value) > 1 or not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise ValueError(f"{PAIRS!r} is not a list of pairs")
    try:
        return {_restore_key(key): from_json(each) for key, each in pairs}
    except TypeError as error:
        raise ValueError(f"{PAIRS!r} holds an invalid key: {error}") from error


def tensor_names(value: Any) -> Iterator[str]:
    """Yield the names of all tensors in a result of :func:`from_json`."""
    if isinstance(value, TensorName):
        yield value.name
    for each in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from tensor_names(each)


def replace_tensor_names(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return values in which tensors replace their names.

    Parameters
    ----------
    value : object
        A result of :func:`from_json`.
    tensors : mapping of str to Tensor
        The tensors by name.

    Returns
    -------
    object
        A copy of ``value``, with a tensor in place of each :class:`TensorName`.
    """
    if isinstance(value, TensorName):
        return tensors[value.name]
    if isinstance(value, list):
        return [replace_tensor_names(each, tensors) for each in value]
    return (
        {key: replace_tensor_names(each, tensors) for key, each in value.items()} if isinstance(value, dict) else value
    )


def _restore_key(key: Any) -> Any:
    if isinstance(key, dict):
        key = from_json(key)
    return tuple(map(_restore_key, key)) if isinstance(key, list) else key
