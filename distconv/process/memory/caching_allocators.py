"""Allocators that keep freed blocks with few holes: which are installed, and which this process has.

A process gets them only by ``LD_PRELOAD``. glibc's own allocator returns large blocks to the kernel, or keeps them in a
heap with holes.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FILES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
    "jemalloc": ("libjemalloc.so.2",),
    "mimalloc": ("libmimalloc.so.3", "libmimalloc.so.2"),
}
"""Library files of each allocator, the best first."""

SETTINGS = {
    "tcmalloc": {"TCMALLOC_RELEASE_RATE": "10"},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:1000,muzzy_decay_ms:1000"},
    "mimalloc": {"MIMALLOC_PURGE_DELAY": "1000"},
}
"""Environment variables by which each allocator keeps freed memory for about a second, and then returns it."""

SYSTEM = ("/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


def find_installed(name: str | None = None) -> tuple[str, Path] | None:
    """Find an installed allocator.

    Parameters
    ----------
    name : str, optional
        The allocator. Default: the first of ``FILES`` that is installed.

    Returns
    -------
    tuple of str and Path, or None
        Name and library file; None if it is not installed.
    """
    folders = list(_folders())
    candidates = ((each, file) for each in ([name] if name else FILES) for file in FILES[each])
    return next(
        ((each, folder / file) for each, file in candidates for folder in folders if (folder / file).is_file()), None
    )


def loaded_allocator(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the name of the allocator that this process has loaded; None for the C library's."""
    try:
        text = maps.read_text()
    except OSError:
        return None
    return next((name for name in FILES if f"/lib{name}" in text), None)


def _folders() -> Iterator[Path]:
    yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    yield Path(sys.prefix) / "lib"
    yield Path(sysconfig.get_path("platlib")) / "cmeel.prefix" / "lib"  # of the wheel cmeel-mimalloc
    yield from map(Path, SYSTEM)
