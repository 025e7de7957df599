"""Where a thread is, as its user knows it: their line, the layer that is being called, the function of torch."""

from __future__ import annotations

import dis
import inspect
import linecache
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

import torch

_OURS = ("torch.", "distconv.", "importlib.")


def is_ours(frame: FrameType) -> bool:
    """Whether ``frame`` runs a function of this package."""
    return f"{frame.f_globals.get('__name__', '')}.".startswith("distconv.")


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
    called: list[torch.nn.Module] = []
    for each in _outwards(frame or sys._getframe(1)):
        owner = each.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (not called or owner is not called[-1]):
            called.append(owner)
    return called[::-1]


def layer_of(modules: list[torch.nn.Module]) -> str:
    """The last of ``modules``, as users know it: by its name in the first one, each being in the one before it.

    One that is no part of the one before goes by its class.
    """
    names = []
    for outer, inner in pairwise(modules):
        matching = (name for name, module in outer.named_modules() if module is inner)
        names.append(next(matching, type(inner).__name__))
    kind = type(modules[-1]).__name__
    return f"{'.'.join(names)!r} ({kind})" if names else kind


def layer_being_called() -> str:
    """Return `` of 'conv1' (Conv2d)`` for the layer whose method is running, or an empty string outside of modules."""
    modules = modules_called(sys._getframe(1))
    return f" of {layer_of(modules)}" if modules else ""


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


_NAMES = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def mpi_method(frame: FrameType) -> str:
    """The method of an mpi4py object that ``frame`` is in the call of, such as ``Intracomm.Barrier``; else empty.

    mpi4py's functions have no frames. From Python 3.11 on an instruction knows where its expression begins: those that
    begin where the call does load ``comm``, then ``.Barrier``. Variables and attributes are looked up, nothing is
    called; before Python 3.11, and of other expressions, nothing is known.
    """
    steps = list(dis.get_instructions(frame.f_code))
    place = next((_begin(step) for step in steps if step.offset == frame.f_lasti), None)
    chain = [step for step in steps if place and _begin(step) == place and step.offset < frame.f_lasti]
    loads = [step for step in chain if step.opname.startswith((*_NAMES, *_ATTRIBUTES))]
    if len(loads) < 2 or not loads[0].opname.startswith(_NAMES):
        return ""
    owner: Any = (frame.f_globals | frame.f_locals).get(loads[0].argval)
    for step in loads[1:-1]:
        owner = inspect.getattr_static(owner, step.argval, None)
    kind = type(owner)
    return f"{kind.__name__}.{loads[-1].argval}" if kind.__module__.startswith("mpi4py.") else ""


def _begin(step: dis.Instruction) -> tuple[int, int] | None:
    positions = getattr(step, "positions", None)
    return positions and (positions.lineno, positions.col_offset)
