"""The operator registry: which distributed operator serves which torch function.

``distconv.layers`` fills it. A function that is not in it raises: nothing ever runs on the blocks alone by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from distconv.errors import UnsupportedOperation

Operator = Callable[..., Any]
F = TypeVar("F", bound=Operator)

_OPERATORS: dict[object, Operator] = {}


def implements(*functions: object) -> Callable[[F], F]:
    """Register the decorated operator for these torch functions; it is called with their arguments.

    Two names of one function may both be given. What another operator already serves is refused, since one of the two
    would be dead.
    """

    def register(operator: F) -> F:
        for function in set(functions):
            assert function not in _OPERATORS, f"{name_of(function)} already has the operator {_OPERATORS[function]}"
            _OPERATORS[function] = operator
        return operator

    return register


def operator_for(function: object) -> Operator:
    """The distributed operator for ``function``.

    Raises
    ------
    UnsupportedOperation
        If there is none.
    """
    found = _OPERATORS.get(function)
    if found is None:
        raise UnsupportedOperation(
            f"{name_of(function)} has no distributed rule; "
            "gather the tensor first (dc.gather(x)) and apply it to the whole"
        )
    return found


def name_of(function: object) -> str:
    """How users know ``function``."""
    known = torch.overrides.resolve_name(function)
    # Never repr(): its address differs between ranks, and all of them raise the same text.
    return known or f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}".lstrip(".")
