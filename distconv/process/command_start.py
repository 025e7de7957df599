"""The restart of a command with an allocator that keeps freed blocks.

The loader reads ``LD_PRELOAD`` when a process starts: hence a second start, which for MPI's launchers is the same
process. It comes before torch and MPI are imported. A script that imports distconv is not started again;
``distconv run`` is the command for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distconv.process.environment import MALLOC
from distconv.process.memory import caching_allocators

_TAKEN = "DISTCONV_PRELOADED"
"""Names the preloaded library to the second start."""


def is_command(arguments: Sequence[str]) -> bool:
    """Return True if Python was started with these arguments as ``distconv ...`` or ``python -m distconv ...``.

    >>> is_command(["/usr/bin/distconv", "info"]), is_command(["-m", "distconv", "info"]), is_command(["train.py"])
    (True, True, False)
    """
    return list(arguments[:2]) == ["-m", "distconv"] or Path(arguments[0] if arguments else "").name == "distconv"


def restart() -> None:
    """Start a command again with the allocator that ``DISTCONV_MALLOC`` names, if it is installed.

    Does nothing in a process that is not a command.
    """
    if not is_command(sys.orig_argv[1:]):
        return
    before = os.environ.get("LD_PRELOAD", "").split()
    taken = os.environ.pop(_TAKEN, None)
    if taken is not None:
        # Processes that the command starts do not inherit the allocator.
        os.environ["LD_PRELOAD"] = " ".join(each for each in before if each != taken)
    elif "torch" not in sys.modules and not caching_allocators.loaded():
        asked = MALLOC.value_or_default()
        found = None if asked == "0" else caching_allocators.installed(None if asked in (None, "1") else asked)
        if found is not None:
            name, library = found[0], str(found[1])
            os.environ |= caching_allocators.SETTINGS.get(name, {})
            os.environ |= {_TAKEN: library, "LD_PRELOAD": " ".join([library, *before])}
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
