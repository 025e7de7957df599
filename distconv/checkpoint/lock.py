"""A lock on a folder of checkpoints: one job at a time writes to it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from distconv.errors import CheckpointError

LOCK = ".lock"

_LOCKED_ERRORS = (errno.EAGAIN, errno.EACCES)
_UNSUPPORTED_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of file systems without locks: some mounts of Lustre and NFS."""

_held: dict[Path, int] = {}
"""Descriptor of the lock of each folder that this process has locked; its end releases the lock."""


def lock_directory(directory: Path) -> None:
    """Create ``directory`` if needed, and lock it until this process ends.

    Uses ``flock``, which NFS passes on to its server. On a file system without locks the folder is not protected.

    Parameters
    ----------
    directory : Path
        Folder of a run's checkpoints. Locking it again is harmless.

    Raises
    ------
    CheckpointError
        If another process has locked it, or its lock file is not a file of its own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    place = directory.resolve()
    if place in _held:
        lock = place / LOCK
        # The file may have been deleted, perhaps with its folder. Another job could then lock a new one.
        if lock.exists() and os.path.samestat(lock.stat(), os.fstat(_held[place])):
            return
        os.close(_held.pop(place))
    # Opened for writing, since NFS otherwise grants no exclusive lock.
    descriptor = _open_lock_file(place / LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace")
        os.close(descriptor)
        if error.errno in _LOCKED_ERRORS:
            raise CheckpointError(
                f"another job writes its checkpoints to {directory}: {owner or 'one that has just begun'}. "
                "Name another folder, or wait for its end, which releases the lock."
            ) from error
        if error.errno not in _UNSUPPORTED_ERRORS:
            raise
        # A file system without locks keeps out no other job. The checkpoint is written all the same.
        return
    _held[place] = descriptor
    job = os.environ.get("SLURM_JOB_ID")
    holder = f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else "")
    # Only for other jobs' errors: on a full disk this fails, and the folder is locked all the same.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)


def _open_lock_file(path: Path) -> int:
    """Open the lock file, but never another file that a link leads to."""
    try:
        # O_NONBLOCK: opening a pipe would wait for its other end.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise CheckpointError(f"{path} is a link or a pipe, not a lock file of distconv. Delete it.") from error
    status = os.fstat(descriptor)
    # Through a hard link the description of the owner would overwrite another file.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise CheckpointError(f"{path} is a hard link or not a file, and not a lock file of distconv. Delete it.")
    return descriptor
