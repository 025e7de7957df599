"""Where a thread is, in the user's terms: their line of code, the layer, the function of torch.

The watchdog's reports, order checks and errors use it. It reads frames and never changes them.
"""

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

_FRAMEWORK_PREFIXES = ("torch.", "distconv.", "importlib.")


def is_distconv_frame(frame: FrameType) -> bool:
    """Return True if ``frame`` runs a function of distconv."""
    return f"{frame.f_globals.get('__name__', '')}.".startswith("distconv.")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame that is neither torch's nor distconv's, or else the outermost."""
    for each in _outwards(frame):
        frame = each
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(_FRAMEWORK_PREFIXES):
            break
    return frame


def running_modules(frame: FrameType | None = None) -> list[torch.nn.Module]:
    """Return the modules whose methods are running in ``frame`` (default: the caller), the outermost first."""
    called: list[torch.nn.Module] = []
    for each in _outwards(frame or sys._getframe(1)):
        owner = each.f_locals.get("self")
        # A call of a module has several frames with the same self.
        if isinstance(owner, torch.nn.Module) and (not called or owner is not called[-1]):
            called.append(owner)
    return called[::-1]


def layer_name(modules: list[torch.nn.Module]) -> str:
    """Return the name of the last of ``modules``, as users know it.

    Parameters
    ----------
    modules : list of Module
        Modules from the outermost to the innermost, as :func:`running_modules` returns them; at least one.

    Returns
    -------
    str
        Its path in the first module and its class, ``'block.conv1' (Conv2d)``. A module that is not a submodule of the
        one before it is named by its class.
    """
    names = []
    for outer, inner in pairwise(modules):
        matching = (name for name, module in outer.named_modules() if module is inner)
        names.append(next(matching, type(inner).__name__))
    kind = type(modules[-1]).__name__
    return f"{'.'.join(names)!r} ({kind})" if names else kind


def running_layer() -> str:
    """Return `` of 'conv1' (Conv2d)`` for the layer whose method is running, or "" outside of modules."""
    modules = running_modules(sys._getframe(1))
    return f" of {layer_name(modules)}" if modules else ""


def describe_call(frame: FrameType) -> str:
    """Return the user's call that ``frame`` is part of.

    ``y = model(x) (train.py, line 7): conv2d of 'conv1' (Conv2d)`` is an example.

    A function of torch is named only if it was called with distributed tensors.

    Parameters
    ----------
    frame : FrameType
        The innermost frame of the thread.

    Returns
    -------
    str
        Line, file, function and layer.
    """
    user = user_frame(frame)
    path, line = user.f_code.co_filename, user.f_lineno
    text = linecache.getline(path, line).strip()
    functions = (each.f_locals.get("func") for each in _outwards(frame) if each.f_code.co_name == "__torch_function__")
    function = getattr(next(functions, None), "__name__", "")
    modules = running_modules(frame)
    layer = layer_name(modules) if modules else ""
    inside = " of ".join(filter(None, (function, layer)))
    return f"{text} ({path}, line {line})".lstrip() + (f": {inside}" if inside else "")


# -- positions that ranks send to each other --------------------------------------------------------------------------

_LIBRARIES = tuple({f"{path}{os.sep}" for path in sysconfig.get_paths().values()})
"""Folders of the standard library and of installed packages."""

_SHOWN_LINES = 4
"""Lines of the user's script that a position shows."""


@dataclass(frozen=True)
class Position:
    """The position of a thread: the user's call, and the lines of their script, the innermost first.

    Lines within a module's ``forward`` are left out: the lines that call the model distinguish training from
    evaluation.
    """

    call: str = ""
    """Function of distconv, operator and layer, or function of a library; "" in the script itself."""
    lines: tuple[tuple[str, int], ...] = ()
    text: str = ""
    """The innermost line."""

    @property
    def where(self) -> str:
        """File and number of the innermost line."""
        return f"{self.lines[0][0]}, line {self.lines[0][1]}" if self.lines else ""

    def __str__(self) -> str:
        outer = ", ".join(
            f"line {line}" if path == self.lines[0][0] else f"{path}, line {line}"
            for path, line in self.lines[1:_SHOWN_LINES]
        )
        text = f": {self.text}" if self.text else ""
        return f"{self.where}{text}{f' (called from {outer})' if outer else ''}"


def position(frame: FrameType, *, blocked: bool = False) -> Position:
    """Return the position of the thread with ``frame``.

    Parameters
    ----------
    frame : FrameType
        The innermost frame of the thread.
    blocked : bool
        True if the thread is in a wait of distconv. Then the layer and the operator are found in the variables of its
        frames. Otherwise these are not read, since the thread is running and changes them.

    Returns
    -------
    Position
        The position.
    """
    frames = list(_outwards(frame))
    layers = [number for number, each in enumerate(frames) if _is_call_of_module(each)]
    # Frames inside of the outermost call of a module belong to the model. The script is outside of it.
    start = layers[-1] + 1 if layers else 0
    script = [number for number in range(start, len(frames)) if _is_user_frame(frames[number])] or [len(frames) - 1]
    inner = frames[: script[0]]
    lines = tuple((frames[number].f_code.co_filename, frames[number].f_lineno) for number in script)
    return Position(_describe_inner_call(inner, blocked=blocked), lines, linecache.getline(*lines[0]).strip())


def _is_user_frame(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not (
        path.startswith((*_LIBRARIES, "<frozen "))
        or f"{frame.f_globals.get('__name__')}.".startswith(_FRAMEWORK_PREFIXES)
    )


def _is_call_of_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_call_impl" and frame.f_globals.get("__name__") == "torch.nn.modules.module"


def _describe_inner_call(inner: list[FrameType], *, blocked: bool) -> str:
    """Return the call that the ``inner`` frames, the innermost first, are part of."""
    if not inner:
        return ""
    operators = [each for each in inner if each.f_code.co_name == "__torch_function__"] if blocked else []
    called = [each.f_locals.get("self") for each in inner[::-1] if blocked and _is_call_of_module(each)]
    modules = [each for each in called if isinstance(each, torch.nn.Module)]
    operator = getattr(operators[0].f_locals.get("func"), "__name__", "") if operators else ""
    if operator or modules:
        return " of ".join(filter(None, (operator, layer_name(modules) if modules else "")))
    if any(map(_is_call_of_module, inner)):
        own = next((f", {each.f_code.co_filename}, line {each.f_lineno}" for each in inner if _is_user_frame(each)), "")
        return f"the forward pass of a module{own}"
    first = inner[-1]
    module, name = first.f_globals.get("__name__", ""), getattr(first.f_code, "co_qualname", first.f_code.co_name)
    name = name.removesuffix(".__init__")
    return name if f"{module}.".startswith("distconv.") else f"{module}.{name}"


def format_ranks(numbers: list[int]) -> str:
    """Return ``numbers`` in words.

    >>> format_ranks([3]), format_ranks([0, 1, 2, 5])
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
