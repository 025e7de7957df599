"""Where a thread is, as its user knows it: their line, the layer that is being called, the function of torch."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType

import torch

_OURS = ("torch.", "distconv.", "importlib.")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_frame(frame: FrameType) -> FrameType:
    """The innermost frame from ``frame`` outwards that is neither torch's nor ours, or else the outermost."""
    for each in _outwards(frame):
        frame = each
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
            break
    return frame


def modules_called(frame: FrameType | None = None) -> list[torch.nn.Module]:
    """Modules in whose methods ``frame`` (default: the caller) is, the outermost first."""
    found: list[torch.nn.Module] = []
    for each in _outwards(frame or sys._getframe(1)):
        owner = each.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (not found or owner is not found[-1]):
            found.append(owner)
    return found[::-1]


def layer_of(modules: list[torch.nn.Module]) -> str:
    """The last of ``modules``, as users know it: by its name in the first one, each being in the one before it.

    One that is no part of the one before goes by its class.
    """
    names = []
    for outer, inner in pairwise(modules):
        known = (name for name, module in outer.named_modules() if module is inner)
        names.append(next(known, type(inner).__name__))
    kind = type(modules[-1]).__name__
    return f"{'.'.join(names)!r} ({kind})" if names else kind


def described(frame: FrameType) -> str:
    """What the user called that ``frame`` is part of: ``y = model(x) (train.py, line 7): conv2d of 'conv1' (Conv2d)``.

    A function is named only if it was called with distributed tensors.
    """
    user = users_frame(frame)
    path, line = user.f_code.co_filename, user.f_lineno
    text = linecache.getline(path, line).strip()
    functions = (each.f_locals.get("func") for each in _outwards(frame) if each.f_code.co_name == "__torch_function__")
    function = getattr(next(functions, None), "__name__", "")
    modules = modules_called(frame)
    layer = layer_of(modules) if modules else ""
    inside = " of ".join(filter(None, (function, layer)))
    return f"{text} ({path}, line {line})".lstrip() + (f": {inside}" if inside else "")
