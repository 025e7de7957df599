"""Compilation of the kernels. The only module that imports numba."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

from distconv.errors import DataError

__all__ = ["Floats", "kernel"]

Floats = npt.NDArray[np.float64]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

try:
    llvm: Any = importlib.import_module("llvmlite.binding")
    # LLVM vectorizes a loop over rows of ten arrays only with many run-time checks that the arrays do not overlap, more
    # than its default limit. Compared with a row their cost is negligible, and a vectorized loop takes a third of the
    # time.
    llvm.set_option("distconv", "--vectorize-memory-check-threshold=1000")
    numba: Any = importlib.import_module("numba")
except ImportError as missing:
    raise DataError("data mesh: numba is not installed. Run pip install numba.") from missing


def remove_stale_cache(folder: Path) -> None:
    """Remove cached machine code of the kernels in ``folder`` that is older than one of its modules.

    Numba checks only if the file of a kernel has changed, not the files of the kernels that are compiled into it.
    """
    newest = max(module.stat().st_mtime for module in folder.glob("*.py"))
    for kept in folder.glob("__pycache__/*.nb?"):
        with suppress(OSError):  # another rank has removed the file, or the folder is not writable
            if kept.stat().st_mtime < newest:
                kept.unlink()


remove_stale_cache(Path(__file__).parent)


def kernel(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function compiled on first use, with its machine code cached on disk.

    Fast-math is off, so that a run is identical on every rank and in every repetition. Division by zero follows IEEE,
    which avoids a branch at each division.

    Parameters
    ----------
    function : callable
        A function in the subset of Python that numba supports.

    Returns
    -------
    callable
        The compiled function.
    """
    return cast("Callable[Arguments, Result]", numba.njit(cache=True, error_model="numpy")(function))
