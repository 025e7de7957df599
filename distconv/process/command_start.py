"""What comes first: a command starts once more with an allocator that keeps freed blocks; variables are checked.

That happens when this module is imported, before torch and MPI are. The loader reads ``LD_PRELOAD`` when a process
starts: hence a second start, which for MPI's launchers is the same process. A script that imports distconv is not
started again on its own; ``distconv run`` is the command for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distconv.errors import BAD_INPUT, EnvironmentVariableError
from distconv.process.environment import MALLOC, check
from distconv.process.memory import caching_allocators

_TAKEN = "DISTCONV_PRELOADED"
"""Tells the second start what the first one took in."""


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
        found = _wanted()
        if found is not None:
            name, library = found[0], str(found[1])
            os.environ |= caching_allocators.SETTINGS.get(name, {})
            os.environ |= {_TAKEN: library, "LD_PRELOAD": " ".join([library, *before])}
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _wanted() -> tuple[str, Path] | None:
    try:
        asked = MALLOC.value()
    except EnvironmentVariableError:
        return None  # told when all ranks can be
    return None if asked == "0" else caching_allocators.installed(None if asked in (None, "1") else asked)


def check_variables() -> None:
    """End all ranks if an environment variable of any of them is bad or differs; a command in one line. Collective.

    Before other modules are imported, which read the variables each by itself.

    Raises
    ------
    EnvironmentVariableError
        On all ranks, unless this is a command.
    """
    from mpi4py import MPI  # after the second start

    world = MPI.COMM_WORLD if MPI.Is_initialized() and not MPI.Is_finalized() else None
    try:
        check(world)
    except EnvironmentVariableError as error:
        if not is_command(sys.orig_argv[1:]):
            raise
        if world is None or world.rank == 0:
            print(f"distconv: {error}", file=sys.stderr, flush=True)
        sys.exit(BAD_INPUT)


restart()
