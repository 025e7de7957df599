"""Verification that the files of a checkpoint exist and are unchanged since the commit.

``reading`` and ``writing`` call this module. It contains no MPI.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from distconv.checkpoint import manifest
from distconv.checkpoint.files import sha256_of
from distconv.errors import CheckpointError
from distconv.whole_files import open_regular

CHUNK_BYTES = 1 << 24
"""Bytes that are read at a time for a checksum."""


def read_complete_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of ``folder``, all of whose files are there with the right size.

    Raises
    ------
    CheckpointError
        If the manifest is damaged, or a file is missing or has another size.
    """
    listing = manifest.read(folder)
    for name, entry in listing["files"].items():
        open_file(folder / name, entry["bytes"]).close()
    return listing


def is_intact(folder: Path) -> bool:
    """Return True if all files of a checkpoint have their checksums.

    Reads all files, unless this process has verified them and they have not changed since.
    """
    try:
        files = read_complete_manifest(folder)["files"]
        # Files that have not changed since they were read are not read again.
        if _verified.get(folder) != _file_states(folder):
            for name, entry in files.items():
                with open_file(folder / name, entry["bytes"]) as file:
                    if sha256_of(iter(lambda file=file: file.read(CHUNK_BYTES), b"")) != entry["sha256"]:  # type: ignore[misc]
                        return False
            cache_verified(folder)
    except (CheckpointError, OSError):
        return False
    return True


def cache_verified(folder: Path) -> None:
    """Record that the files in ``folder`` were just written or verified, so they need no check until they change."""
    # Deleted checkpoints are forgotten, so that the table does not grow without end.
    for gone in [each for each in _verified if not each.exists()]:
        del _verified[gone]
    with contextlib.suppress(OSError):
        seen = _file_states(folder)
        # A file that is written again in the same tick of the clock has the same state, so the change would be missed.
        if time.time_ns() - max((state[-1] for state in seen), default=0) > _TICK_NS:
            _verified[folder] = seen


_FileStates = tuple[tuple[str, int, int, int, int], ...]

_verified: dict[Path, _FileStates] = {}
"""State of the files of each checkpoint when it was verified."""

_TICK_NS = 20_000_000
"""Upper bound on the resolution of a file system's clock, in nanoseconds."""


def _file_states(folder: Path) -> _FileStates:
    """Return a value that differs after a file of tensors was written, added or deleted.

    Manifests are not part of it: they are read at each use.
    """
    with os.scandir(folder) as entries:
        states = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries if entry.name.endswith(".h5")]
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in sorted(states))


def open_file(path: Path, nbytes: int) -> BinaryIO:
    """Open a file of a checkpoint for reading, and check its size.

    Parameters
    ----------
    path : Path
        The file.
    nbytes : int
        Its size in the manifest.

    Returns
    -------
    BinaryIO
        The file. The caller closes it.

    Raises
    ------
    CheckpointError
        If the file is missing, a link or not a regular file, or has another size.
    """
    try:
        file = open_regular(path, follow_links=False)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path.parent} is incomplete: {error}") from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.parent} is damaged: {error}; {manifest.SUGGESTED_FIX}") from error
    size = os.fstat(file.fileno()).st_size
    if size != nbytes:
        file.close()
        raise CheckpointError(
            f"checkpoint {path.parent} is damaged: {path.name} has {size} bytes, not {nbytes}; {manifest.SUGGESTED_FIX}"
        )
    return file
