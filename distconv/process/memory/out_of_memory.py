"""Explanation of an out-of-memory error: the layer, the requested size, and a suggested fix.

:mod:`distconv.process.endings` prints it after the traceback of a rank that fails.
"""

from __future__ import annotations

import re
import resource
import traceback
from types import TracebackType

import torch

from distconv.process.call_stack import layer_name

_TEXTS = ("can't allocate memory", "not enough memory", "out of memory")
_ASKED = re.compile(r"allocate (\d[\d.]* \w+)")


def explain_memory_error(error: BaseException | None, trace: TracebackType | None) -> str:
    """Return the explanation of an out-of-memory error.

    Parameters
    ----------
    error : BaseException or None
        The error.
    trace : TracebackType or None
        Its traceback, in which the layer is found.

    Returns
    -------
    str
        A line with a line end, to be printed after the traceback; "" for any other error.
    """
    text = str(error)
    if not (isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(t in text for t in _TEXTS))):
        return ""
    asked = _ASKED.search(text)
    return (
        f"out of memory{_where(trace)}: asked for {asked[1] if asked else 'more'}, this process has had "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB; use more ranks or a smaller batch "
        "(distconv plan --memory shows what fits)\n"
    )


def _where(trace: TracebackType | None) -> str:
    """Return the layer that was called, or the operator whose derivative was being computed."""
    modules: list[torch.nn.Module] = []
    operator = ""
    for frame, _ in traceback.walk_tb(trace):
        owner = frame.f_locals.get("self")
        # From the outermost frame to the one that failed.
        if isinstance(owner, torch.nn.Module) and (not modules or owner is not modules[-1]):
            modules.append(owner)
        if frame.f_code.co_name == "backward" and "ctx" in frame.f_locals:
            of = type(frame.f_locals["ctx"]).__name__.removesuffix("Backward").lstrip("_")
            operator = f" in the derivative of {of}"
    return f" in {layer_name(modules)}" if modules else operator
