"""Warnings that are issued once for each call site.

A call site is a line of the user's code, in one layer, that calls one function. The fallback
(:mod:`distconv.layers.common.gathered_call`) warns here before it gathers.
"""

from __future__ import annotations

import sys
import warnings
from weakref import WeakKeyDictionary

import torch

from distconv.dispatch import with_layer
from distconv.process.call_stack import running_modules, user_frame

CallSite = tuple[str, int, object]
"""File name, line number and called function."""

_warned: set[CallSite] = set()
"""Call sites outside any module's ``forward``."""
_warned_in: WeakKeyDictionary[torch.nn.Module, set[CallSite]] = WeakKeyDictionary()
"""Call sites in the ``forward`` of each module. Weak keys: an entry must not keep a model alive."""


def warn_once(message: str, category: type[Warning], function: object) -> None:
    """Warn at the user's line that called a function, unless this line has warned in the same layer before.

    Parameters
    ----------
    message : str
        The name of the running layer is added.
    category : type
        Subclass of Warning.
    function : object
        The called function.
    """
    frame = user_frame(sys._getframe(1))
    site = (frame.f_code.co_filename, frame.f_lineno, function)
    modules = running_modules()
    warned = _warned_in.setdefault(modules[-1], set()) if modules else _warned
    if site not in warned:
        warnings.warn_explicit(with_layer(message), category, *site[:2])
        # Only after the warning: if warnings are errors, each call raises.
        warned.add(site)


def clear_warned_sites() -> None:
    """Forget all call sites, so that each of them warns again."""
    _warned.clear()
    _warned_in.clear()
