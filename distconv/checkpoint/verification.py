"""Whether a checkpoint's files are there, and what they were when it was committed."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from distconv.checkpoint import manifest
from distconv.checkpoint.files import digest_of
from distconv.errors import CheckpointError
from distconv.whole_files import open_regular

AT_ONCE = 1 << 24
"""Bytes that are read at a time for a checksum."""


def listed(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``, whose files are there.

    Raises
    ------
    CheckpointError
        If it is damaged, or they are not.
    """
    listing = manifest.read(folder)
    for name, entry in listing["files"].items():
        open_file(folder / name, entry["bytes"]).close()
    return listing


def is_whole(folder: Path) -> bool:
    """Whether all files of a checkpoint are what they were. Local; reads all of them, unless it has before."""
    try:
        files = listed(folder)["files"]
        if _whole.get(folder) != _seen(folder):
            for name, entry in files.items():
                with open_file(folder / name, entry["bytes"]) as file:
                    if digest_of(iter(lambda file=file: file.read(AT_ONCE), b"")) != entry["sha256"]:  # type: ignore[misc]
                        return False
            note_whole(folder)
    except (CheckpointError, OSError):
        return False
    return True


def note_whole(folder: Path) -> None:
    """What lies in ``folder`` was just written, or read and verified: it is whole as long as it is as it is now."""
    for gone in [each for each in _whole if not each.exists()]:
        del _whole[gone]
    with contextlib.suppress(OSError):
        seen = _seen(folder)
        # What is written to in the same tick of the clock looks as before.
        if time.time_ns() - max((state[-1] for state in seen), default=0) > _TICK_NS:
            _whole[folder] = seen


_Seen = tuple[tuple[str, int, int, int, int], ...]

_whole: dict[Path, _Seen] = {}
"""What was seen of the files of each checkpoint that was whole."""

_TICK_NS = 20_000_000
"""More than between two times that a file system tells apart."""


def _seen(folder: Path) -> _Seen:
    """Differs when a file of tensors was written to, or has come or gone. Manifests are read whenever they are used."""
    with os.scandir(folder) as entries:
        states = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries if entry.name.endswith(".h5")]
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in sorted(states))


def open_file(path: Path, nbytes: int) -> BinaryIO:
    """A file of a checkpoint, opened for reading, which has as many bytes as it must have.

    Raises
    ------
    CheckpointError
        If it has not, or is none.
    """
    try:
        file = open_regular(path, follow_links=False)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path.parent} is incomplete: {error}") from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.parent} is damaged: {error}; {manifest.WAY_OUT}") from error
    size = os.fstat(file.fileno()).st_size
    if size != nbytes:
        file.close()
        raise CheckpointError(
            f"checkpoint {path.parent} is damaged: {path.name} has {size} bytes, not {nbytes}; {manifest.WAY_OUT}"
        )
    return file
