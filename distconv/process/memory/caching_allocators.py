"""Allocators that keep freed blocks with few holes: which are installed, and which this process has.

They come into a process by ``LD_PRELOAD`` alone. glibc's own gives large blocks back to the kernel, or keeps them in a
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
"""By name, the best first."""

SETTINGS = {
    "tcmalloc": {"TCMALLOC_RELEASE_RATE": "10"},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:1000,muzzy_decay_ms:1000"},
    "mimalloc": {"MIMALLOC_PURGE_DELAY": "1000"},
}
"""The variables by which they keep what is freed for about a second, and give the rest back by themselves."""

SYSTEM = ("/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


def installed(name: str | None = None) -> tuple[str, Path] | None:
    """The name and the file of the allocator ``name``, else of the first that is installed; None if there is none."""
    folders = list(_folders())
    candidates = ((each, file) for each in ([name] if name else FILES) for file in FILES[each])
    return next(
        ((each, folder / file) for each, file in candidates for folder in folders if (folder / file).is_file()), None
    )


def loaded(maps: Path = Path("/proc/self/maps")) -> str | None:
    """The name of the one that this process has; None: it has the C library's."""
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
