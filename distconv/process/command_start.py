"""The first steps of a process: an allocator that keeps freed blocks, MPI, and whether MPI fits its launcher.

The first happens when this module is imported, before torch and MPI are. The loader reads ``LD_PRELOAD`` when a process
starts: hence a second start, which for MPI's launchers is the same process. A script that imports distconv is not
started again on its own; ``distconv run`` is the command for it.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from distconv.errors import BAD_INPUT, EnvironmentVariableError, LaunchError
from distconv.process import launchers
from distconv.process.environment import MALLOC
from distconv.process.memory import caching_allocators

_TAKEN = "DISTCONV_PRELOADED"
"""Tells the second start what the first one took in."""

_SPEAKER_S = 2.0
"""What processes that say nothing wait for the one that does: launchers end all when one has ended."""


def is_command(arguments: Sequence[str]) -> bool:
    """Whether Python was started with these arguments as ``distconv ...`` or ``python -m distconv ...``.

    >>> is_command(["/usr/bin/distconv", "info"]), is_command(["-m", "distconv", "info"]), is_command(["train.py"])
    (True, True, False)
    """
    return list(arguments[:2]) == ["-m", "distconv"] or Path(arguments[0] if arguments else "").name == "distconv"


def restart() -> None:
    """Start this command again with the allocator that ``DISTCONV_MALLOC`` says, if it is installed."""
    before = os.environ.get("LD_PRELOAD", "").split()
    taken = os.environ.pop(_TAKEN, None)
    if taken is not None:
        # What this process starts in turn is no business of ours.
        os.environ["LD_PRELOAD"] = " ".join(each for each in before if each != taken)
    elif is_command(sys.orig_argv[1:]) and "torch" not in sys.modules and not caching_allocators.loaded():
        wanted = _wanted()
        if wanted is not None:
            name, library = wanted[0], str(wanted[1])
            os.environ |= caching_allocators.SETTINGS.get(name, {})
            os.environ |= {_TAKEN: library, "LD_PRELOAD": " ".join([library, *before])}
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _wanted() -> tuple[str, Path] | None:
    try:
        asked = MALLOC.value()
    except EnvironmentVariableError:
        return None  # told when all ranks can be
    return None if asked == "0" else caching_allocators.installed(None if asked in (None, "1") else asked)


def check_wheel() -> None:
    """End all processes if the launcher and an MPI library from PyPI do not understand each other; before MPI starts.

    Raises
    ------
    LaunchError
        On all processes, unless this is a command.
    """
    try:
        launchers.check_wheel()
    except LaunchError as error:
        _refuse(error)
    except EnvironmentVariableError:
        return  # told when all ranks can be


def import_mpi() -> None:
    """Import MPI, which initializes it as mpi4py does; not in a worker process, which is no rank."""
    if launchers.is_worker():
        import mpi4py

        initialize = mpi4py.rc.initialize
        # It inherits the launcher's variables, but not the connection that they name: MPI would end the process.
        mpi4py.rc.initialize = False
        try:
            importlib.import_module("mpi4py.MPI")
        finally:
            mpi4py.rc.initialize = initialize
        return
    with warnings.catch_warnings(), launchers.told_if_mpi_ends_it():
        # mpi4py's warning of what check_launch ends.
        warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
        importlib.import_module("mpi4py.MPI")


def check_launch() -> None:
    """End all processes if the launcher started several, and MPI has one rank in each.

    Raises
    ------
    LaunchError
        On all processes, unless this is a command.
    """
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    try:
        launchers.check(MPI.COMM_WORLD.size, MPI.get_vendor()[0])
    except LaunchError as error:
        _refuse(error)
    except EnvironmentVariableError:
        return


def _refuse(error: LaunchError) -> None:
    """Raise it so that one process prints one line."""
    first = launchers.speaks()
    shown = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            shown(kind, value, trace)
        elif first:
            print(f"distconv: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_SPEAKER_S)

    sys.excepthook = hook
    if not is_command(sys.orig_argv[1:]):
        raise error
    hook(type(error), error, None)
    sys.exit(BAD_INPUT)


restart()
if not launchers.is_worker():
    check_wheel()
