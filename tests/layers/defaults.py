"""Defaults of operators against those in the signatures of the torch functions that they implement."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from distconv import dispatch

NONE = inspect.Parameter.empty
MEANS_ALL = ("dim", "dims", "stride")
"""Parameters for which no number, (), [] and None all mean what torch does without the argument."""


def signatures(function: Any) -> Iterator[dict[str, Any]]:
    """Yield the defaults by name of a function of torch: of its Python signature, or of its schemas in ATen."""
    try:
        yield {name: each.default for name, each in inspect.signature(function).parameters.items()}
    except (TypeError, ValueError):
        name = getattr(function, "__name__", "")
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
            yield {each.name: each.default_value if each.has_default_value() else NONE for each in schema.arguments}


def plain(value: Any) -> tuple[str, Any]:
    """Return a default so that equal ones compare equal: [0, 0] and (0, 0) are 0 for every dimension."""
    if isinstance(value, (list, tuple)):
        value = value[0] if len(set(value)) == 1 else tuple(value)
    return type(value).__name__, value


def module_of(operator: Any) -> str:
    """Return the module of an operator, or of the function of a partial one."""
    while isinstance(operator, functools.partial):
        operator = operator.func
    return str(operator.__module__)


def pairs(package: str) -> list[tuple[str, str, Any, list[Any]]]:
    """Return function, parameter, our default and those of torch, for the operators of a package."""
    found = []
    for function, rule in dispatch.rules().items():
        if not module_of(rule.operator).startswith(f"distconv.layers.{package}."):
            continue
        try:
            ours = inspect.signature(rule.operator).parameters
        except (TypeError, ValueError):
            continue
        theirs = [each for each in signatures(function) if set(ours) & set(each)]
        for name, parameter in ours.items():
            defaults = [each[name] for each in theirs if each.get(name, NONE) is not NONE]
            if parameter.default is not NONE and defaults:
                found.append((dispatch.name_of(function), name, parameter.default, defaults))
    return found


def is_exempt(function: str, name: str, ours: Any, theirs: list[Any]) -> bool:
    """Return True where equal defaults are written in another way."""
    if function.endswith("_with_indices"):  # torch ignores the argument
        return name == "return_indices"
    if name in MEANS_ALL and ours in ((), None) and all(each in ([], None) for each in theirs):
        return True
    return function.startswith("torch.fft.") and name == "dim" and ours == ()  # replaced by torch's in the operator


def assert_as_in_torch(package: str, least: int) -> None:
    """Assert that at least ``least`` defaults of a package of layers can be compared and that all equal torch's."""
    compared = pairs(package)
    assert len(compared) >= least
    wrong = [
        (function, name, ours, theirs)
        for function, name, ours, theirs in compared
        if plain(ours) not in map(plain, theirs) and not is_exempt(function, name, ours, theirs)
    ]
    assert not wrong
