"""Objects at the path of a file that are not the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distconv as dc
from tests.distconv.layouts import raises_everywhere


def link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


STATES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "an empty file": lambda path: path.touch(),
    "text": lambda path: path.write_text("once upon a time\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "a number": lambda path: path.write_text("3"),
    "a list": lambda path: path.write_text("[1, 2]"),
    "a link to nothing": link,
    "a link to itself": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
    "a file that cannot be read": lambda path: path.symlink_to("/proc/self/mem"),  # EIO, for root as well
    "a device": lambda path: path.symlink_to("/dev/full"),
}


def check_rejected(comm: Any, path: Path, state: str, read: Callable[[Path, Any], object]) -> None:
    """Bring ``path`` into a state and check that ``read(path, comm)`` raises one error with its name on all ranks."""
    if comm.rank == 0:
        STATES[state](path)
    comm.Barrier()
    raises_everywhere(comm, dc.DistconvError, path.stem, lambda: read(path, comm))
