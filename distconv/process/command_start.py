"""The restart of a command with an allocator that keeps freed blocks.

The dynamic loader reads ``LD_PRELOAD`` only when a program starts. So the command replaces itself by ``execv``, in the
same process, which MPI's launchers do not notice. This must come before torch and MPI are imported. A script that
imports distconv is not restarted; ``distconv run`` is the command for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distconv.process.environment import MALLOC
from distconv.process.memory import caching_allocators

_PRELOADED = "DISTCONV_PRELOADED"
"""Environment variable that passes the path of the preloaded library to the restarted command.

Its presence shows that the command has been restarted already.
"""


def is_command(arguments: Sequence[str]) -> bool:
    """Return True if Python was started with these arguments as ``distconv ...`` or ``python -m distconv ...``.

    >>> is_command(["/usr/bin/distconv", "info"]), is_command(["-m", "distconv", "info"]), is_command(["train.py"])
    (True, True, False)
    """
    return list(arguments[:2]) == ["-m", "distconv"] or Path(arguments[0] if arguments else "").name == "distconv"


def reexec_with_allocator() -> None:
    """Restart a command with the allocator that ``DISTCONV_MALLOC`` names, if it is installed.

    Does nothing in a process that is not a command. Does not return if it restarts.
    """
    if not is_command(sys.orig_argv[1:]):
        return
    before = os.environ.get("LD_PRELOAD", "").split()
    taken = os.environ.pop(_PRELOADED, None)
    if taken is not None:
        # Processes that the command starts do not inherit the allocator.
        os.environ["LD_PRELOAD"] = " ".join(each for each in before if each != taken)
    elif "torch" not in sys.modules and not caching_allocators.loaded_allocator():
        asked = MALLOC.value_or_default()
        found = None if asked == "0" else caching_allocators.find_installed(None if asked in (None, "1") else asked)
        if found is not None:
            name, library = found[0], str(found[1])
            os.environ |= caching_allocators.SETTINGS.get(name, {})
            os.environ |= {_PRELOADED: library, "LD_PRELOAD": " ".join([library, *before])}
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
