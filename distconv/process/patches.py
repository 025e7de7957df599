"""What distconv replaces in torch for as long as the process lives: each target, why, and by which module.

torch asks a DistTensor first in most of what it does. The targets here it does not ask about, or not in time.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch

from distconv.errors import DistconvError


class Patch(NamedTuple):
    """One attribute of torch that is another one now."""

    target: str
    why: str
    by: str
    """The module that replaces it."""


_PATCHES: list[Patch] = []


def replace(owner: Any, name: str, new: Any, why: str) -> Any:
    """Let ``owner.name``, which torch has, be ``new``; returns what it was.

    Raises
    ------
    DistconvError
        If this torch has no such attribute: what the patch is for would go wrong without a word.
    """
    inside = "" if isinstance(owner, ModuleType) or "." in owner.__qualname__ else f"{owner.__module__}."
    target = f"{inside}{owner.__name__ if not hasattr(owner, '__qualname__') else owner.__qualname__}"
    by = sys._getframe(1).f_globals["__name__"]
    if not hasattr(owner, name):
        raise DistconvError(
            f"torch {torch.__version__} has no {target}.{name}, which distconv replaces ({why}): use a torch that "
            "distconv has been tested with, see constraints.txt"
        )
    old = vars(owner).get(name, getattr(owner, name))
    setattr(owner, name, new)
    _PATCHES.append(Patch(f"{target}.{name}", why, by))
    return old


def patches() -> tuple[Patch, ...]:
    """All of them, in the order in which they were made."""
    return tuple(_PATCHES)
