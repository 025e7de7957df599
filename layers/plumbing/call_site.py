"""Warnings that come once for each call site: a user's line, in one layer, calling one function."""

from __future__ import annotations

import sys
import warnings
from weakref import WeakKeyDictionary

import torch

from distconv.dispatch import with_layer
from distconv.process.call_stack import running_modules, user_frame

Site = tuple[str, int, object]

_warned: set[Site] = set()
_warned_in: WeakKeyDictionary[torch.nn.Module, set[Site]] = WeakKeyDictionary()


def warn_once(text: str, category: type[Warning], function: object) -> None:
    """Warn that the line of the user's that called ``function`` does ``text``, unless this layer has there before."""
    frame = user_frame(sys._getframe(1))
    site = (frame.f_code.co_filename, frame.f_lineno, function)
    modules = running_modules()
    warned = _warned_in.setdefault(modules[-1], set()) if modules else _warned
    if site not in warned:
        warnings.warn_explicit(with_layer(text), category, *site[:2])
        # Later: where warnings are errors every call raises.
        warned.add(site)


def forget() -> None:
    """Warn anew of every call site."""
    _warned.clear()
    _warned_in.clear()
