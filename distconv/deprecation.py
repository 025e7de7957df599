"""Former names of public classes and functions, which warn when they are used."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that gives renamed attributes by their former names.

    Parameters
    ----------
    module : str
        The module, ``__name__``.
    names : mapping of str to str
        The present name for each former one.

    Returns
    -------
    callable
        For a former name it issues a ``DeprecationWarning`` and returns the attribute; otherwise it raises
        AttributeError.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {module}.{names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), names[name])

    return get
