"""Patches of torch: the attributes that distconv replaces, why, and by which module.

torch dispatches most calls with a DistTensor to it first. The functions that are patched are called without that
dispatch, or use the tensor before it. Modules declare their patches when they are imported;
:func:`~distconv.process.start` applies all of them, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from distconv.errors import DistconvError


class Patch(NamedTuple):
    """A replaced attribute of torch."""

    owner: Any
    name: str
    new: Any
    why: str
    by: str
    """The module that declares the patch."""

    @property
    def target(self) -> str:
        """The dotted name of the attribute."""
        qualified = getattr(self.owner, "__qualname__", self.owner.__name__)
        module = "" if isinstance(self.owner, ModuleType) or "." in qualified else f"{self.owner.__module__}."
        return f"{module}{qualified}.{self.name}"


_PATCHES: list[Patch] = []
_start_callbacks: list[Callable[[], None]] = []


def declare(owner: Any, name: str, new: Any, why: str) -> None:
    """Declare that ``new`` replaces the attribute ``owner.name`` of torch once distconv has started.

    Parameters
    ----------
    owner : module or type
        Owner of the attribute.
    name : str
        The attribute.
    new : object
        Its new value.
    why : str
        The reason, for errors and documentation.

    Raises
    ------
    DistconvError
        If this version of torch has no such attribute: without the patch, results would be silently wrong.
    """
    patch = Patch(owner, name, new, why, sys._getframe(1).f_globals["__name__"])
    # When the module is imported: a torch without the attribute is reported before any call depends on it.
    if not hasattr(owner, name):
        raise DistconvError(
            f"torch {torch.__version__} has no {patch.target}, which distconv replaces ({why}): use a torch that "
            "distconv has been tested with, see constraints.txt"
        )
    _PATCHES.append(patch)


def replace(owner: Any, name: str, new: Any, why: str) -> None:
    """Declare a patch and apply it now.

    For modules of torch that are loaded after distconv has started, such as the compiler.

    Parameters
    ----------
    owner, name, new, why
        As in :func:`declare`.

    Raises
    ------
    DistconvError
        As :func:`declare`.
    """
    declare(owner, name, new, why)
    setattr(owner, name, new)


def call_at_start(act: Callable[[], None]) -> None:
    """Register ``act`` to be called by :func:`apply`, for patches that depend on the loaded modules of torch."""
    _start_callbacks.append(act)


@cache
def apply() -> None:
    """Apply all declared patches, at the first call."""
    for patch in _PATCHES:
        setattr(patch.owner, patch.name, patch.new)
    for act in _start_callbacks:
        act()


def patches() -> tuple[Patch, ...]:
    """Return all patches in the order in which they were declared."""
    return tuple(_PATCHES)
