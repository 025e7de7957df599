"""Functions of a user's that run while a step is recorded: a replay depends on what their code reads."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from distconv.capture.watch.names import names_in
from distconv.capture.watch.values import OURS

_LIBRARIES = {*OURS, "numpy", "mpi4py"}
"""Packages whose functions depend on nothing of a user's, as those of Python's own, which lie there."""

_PYTHONS = str(Path(os.__file__).parent) + os.sep


class Executed:
    """What code has run in this thread, forward and backward, hooks included, apart from libraries'."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}
        self._closures: dict[int, set[tuple[int | None, ...]]] = {}
        """By the id of code, ids of what was in its variables from outside: one code may be of several functions."""

    @contextmanager
    def noted(self, begins: Callable[[FrameType], None]) -> Iterator[None]:
        """Inside, code that runs is noted; ``begins`` is told before any runs for the first time."""
        import torch._dynamo  # noqa: F401 - torch loads it at the first call that a mode sees: no code of a step

        libraries: dict[int, bool] = {}

        def note(frame: FrameType, _: str, __: object) -> None:
            names = frame.f_globals
            of_library = libraries.get(id(names))
            if of_library is None:
                of_library = libraries[id(names)] = _of_library(names)
            if of_library:
                return
            code = frame.f_code
            if id(code) not in self._codes:
                begins(frame)
            self._codes[id(code)] = code
            variables = frame.f_locals if code.co_freevars else {}
            closure = tuple(id(variables[name]) if name in variables else None for name in code.co_freevars)
            self._closures.setdefault(id(code), set()).add(closure)

        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # Collections come at any time, and what they call is not the step's.
        sys.settrace(note)  # It is told of calls alone, since it returns None.
        try:
            yield
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()

    def functions(self) -> list[FunctionType]:
        """Functions that have run. Those that a function makes while it runs are in its own code."""
        holders = gc.get_referrers(*self._codes.values()) if self._codes else []
        return [each for each in holders if isinstance(each, FunctionType) and self._has_run(each)]

    def _has_run(self, function: FunctionType) -> bool:
        code = function.__code__
        if not code.co_freevars:
            return id(code) in self._codes
        # What it sets itself may be another by now.
        kept = [n for n, name in enumerate(code.co_freevars) if name not in names_in(code).cells_set]
        now = [_id_in(cell) for cell in function.__closure__ or ()]
        return any(all(now[n] == noted[n] for n in kept) for noted in self._closures.get(id(code), ()))


def _id_in(cell: Any) -> int | None:
    try:
        return id(cell.cell_contents)
    except ValueError:
        return None


def _of_library(names: dict[str, Any]) -> bool:
    package, file = str(names.get("__name__", "")).partition(".")[0], str(names.get("__file__") or _PYTHONS)
    # A user's package may have the name of one of Python's.
    return package in _LIBRARIES or (package in sys.stdlib_module_names and file.startswith(_PYTHONS))
