"""Where a thread is, as its user knows it: their line, the layer that is being called, the function of torch."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType

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


# -- where a rank is, for the others ----------------------------------------------------------------------------------

_LIBRARIES = tuple({f"{path}{os.sep}" for path in sysconfig.get_paths().values()})
"""Folders of the standard library and of installed packages."""

_LEVELS = 4
"""Lines of the user's script that a position shows."""


@dataclass(frozen=True)
class Position:
    """Where a thread is: what the user called, and the lines of their script, the innermost first.

    Lines within a module's ``forward`` are left out: those that call the model tell training and evaluation apart.
    """

    call: str = ""
    """Function of distconv, operator and layer, or function of a library; empty in the script itself."""
    lines: tuple[tuple[str, int], ...] = ()
    text: str = ""
    """The innermost line."""

    @property
    def where(self) -> str:
        """The innermost line's file and number."""
        return f"{self.lines[0][0]}, line {self.lines[0][1]}" if self.lines else ""

    def __str__(self) -> str:
        outer = ", ".join(
            f"line {line}" if path == self.lines[0][0] else f"{path}, line {line}"
            for path, line in self.lines[1:_LEVELS]
        )
        text = f": {self.text}" if self.text else ""
        return f"{self.where}{text}{f' (called from {outer})' if outer else ''}"


def position(frame: FrameType, *, blocked: bool = False) -> Position:
    """Where the thread with ``frame`` is.

    Parameters
    ----------
    frame : FrameType
        The innermost frame of the thread.
    blocked : bool
        True if the thread is in a wait of distconv's: the layer and the operator are looked up then, which takes
        variables of frames of torch and distconv. A running thread's are left alone.
    """
    frames = list(_outwards(frame))
    layers = [number for number, each in enumerate(frames) if _is_call_of_module(each)]
    start = layers[-1] + 1 if layers else 0
    script = [number for number in range(start, len(frames)) if _is_users(frames[number])] or [len(frames) - 1]
    inner = frames[: script[0]]
    lines = tuple((frames[number].f_code.co_filename, frames[number].f_lineno) for number in script)
    return Position(_call(inner, blocked=blocked), lines, linecache.getline(*lines[0]).strip())


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not (path.startswith((*_LIBRARIES, "<frozen ")) or f"{frame.f_globals.get('__name__')}.".startswith(_OURS))


def _is_call_of_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_call_impl" and frame.f_globals.get("__name__") == "torch.nn.modules.module"


def _call(inner: list[FrameType], *, blocked: bool) -> str:
    """The call that ``inner`` frames, the innermost first, are part of."""
    if not inner:
        return ""
    operators = [each for each in inner if each.f_code.co_name == "__torch_function__"] if blocked else []
    called = [each.f_locals.get("self") for each in inner[::-1] if blocked and _is_call_of_module(each)]
    modules = [each for each in called if isinstance(each, torch.nn.Module)]
    operator = getattr(operators[0].f_locals.get("func"), "__name__", "") if operators else ""
    if operator or modules:
        return " of ".join(filter(None, (operator, layer_of(modules) if modules else "")))
    if any(map(_is_call_of_module, inner)):
        own = next((f", {each.f_code.co_filename}, line {each.f_lineno}" for each in inner if _is_users(each)), "")
        return f"the forward pass of a module{own}"
    first = inner[-1]
    module, name = first.f_globals.get("__name__", ""), getattr(first.f_code, "co_qualname", first.f_code.co_name)
    name = name.removesuffix(".__init__")
    return name if f"{module}.".startswith("distconv.") else f"{module}.{name}"


def ranks(numbers: list[int]) -> str:
    """``numbers`` in words.

    >>> ranks([3]), ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
