"""Keep freed memory in the process, so that large activations are not mapped and page-faulted anew at each step.

glibc maps every block above its threshold by itself and returns it at once. Raising the thresholds makes a training
step several times faster at 1024x1024. ``DISTCONV_MALLOC=0`` leaves the allocator alone, ``1`` sets it also in a
process that runs alone.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
LARGEST = (1 << 31) - 1
"""What mallopt can take: blocks above it are still mapped."""


ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(LARGEST), "MALLOC_TRIM_THRESHOLD_": str(LARGEST)}
"""The same settings for a process that is yet to be started."""


_SMALL = 1 << 20


def keep_freed_memory(ranks: int) -> bool:
    """Raise glibc's thresholds if asked to or with more than one rank; returns whether that was done."""
    wanted = os.environ.get("DISTCONV_MALLOC", "1" if ranks > 1 else "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"DISTCONV_MALLOC={wanted!r} must be 0 or 1")
    if wanted == "0":
        return False
    return _raise_thresholds()


def _raise_thresholds() -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # A library that refuses so high a threshold still can be told not to map at all.
    mapped = mallopt(_MMAP_THRESHOLD, LARGEST) or mallopt(_MMAP_MAX, 0)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, LARGEST))


def return_freed_memory() -> bool:
    """Have every block above a megabyte mapped by itself and returned at once: slower, and the least memory."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _SMALL) and mallopt(_MMAP_MAX, 1 << 16) and mallopt(_TRIM_THRESHOLD, _SMALL))
