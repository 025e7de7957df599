"""One job at a time writes to a folder of checkpoints."""

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

_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks say: some mounts of Lustre and NFS."""

_held: dict[Path, int] = {}
"""Descriptor of the lock of each folder that this process has; it goes with the process, even with a killed one."""


def lock(directory: Path) -> None:
    """Make ``directory`` if need be, and keep other processes from locking it until this one ends.

    ``flock``, which NFS passes on to its server. Where a file system has no locks nobody is kept out.

    Raises
    ------
    CheckpointError
        If another process has it, or something else has its name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    place = directory.resolve()
    if place in _held:
        if _is_still(place / LOCK, _held[place]):
            return
        os.close(_held.pop(place))
    # Open for writing, or NFS gives no exclusive lock.
    descriptor = _opened(place / LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace")
        os.close(descriptor)
        if error.errno in _TAKEN:
            raise CheckpointError(
                f"another job writes its checkpoints to {directory}: {owner or 'one that has just begun'}; "
                "name another folder, or wait for its end: the lock goes with the process"
            ) from error
        if error.errno not in _NO_LOCKS:
            raise
        return
    _held[place] = descriptor
    # On a full disk there is a lock all the same.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _owner().encode(), 0)


def _opened(path: Path) -> int:
    """The file of the lock, open; never another one that a link leads to."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise CheckpointError(f"{path} is a link or a pipe, and no lock of ours; delete it") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise CheckpointError(f"{path} is a second name of another file, or none, and no lock of ours; delete it")
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file has not been deleted meanwhile, with its folder perhaps."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


def _owner() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else "")
