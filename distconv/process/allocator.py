"""How this process's memory is kept, so that large activations are not page-faulted anew, 4 KB at a time, at each step.

With glibc as it is, a step at 1024x1024 takes several times longer than it must. Where the kernel offers transparent
huge pages, blocks above a megabyte are mapped by themselves in pages of 2 MB and given back when freed, which
costs little and leaves no holes; smaller ones stay in the heap. Elsewhere everything stays in the heap: as fast, but
its holes can cost as much memory again. ``DISTCONV_MALLOC`` chooses.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from distconv.process.environment import MALLOC

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_LARGEST = (1 << 31) - 1
"""What mallopt can take."""
_MAPPED_BYTES = 1 << 20
"""Blocks from here on are mapped by themselves where there are huge pages."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages() -> bool:
    """Whether the kernel gives huge pages to memory that asks for them."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False


def environment() -> dict[str, str]:
    """The same settings as environment variables, for a process that is yet to be started."""
    mapped = _MAPPED_BYTES if huge_pages() else _LARGEST
    pages = {"THP_MEM_ALLOC_ENABLE": "1"} if huge_pages() else {}
    return {"MALLOC_MMAP_THRESHOLD_": str(mapped), "MALLOC_TRIM_THRESHOLD_": str(_LARGEST), **pages}


def wanted(ranks: int) -> bool:
    """Whether memory is to be kept: as asked for, else with more than one rank."""
    asked = MALLOC.value()
    return ranks > 1 if asked is None else asked


def keep_memory(ranks: int) -> bool:
    """Set the allocator if asked to or with more than one rank; returns whether that was done."""
    if not wanted(ranks):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    if huge_pages():
        # torch reads this when it first allocates a tensor.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        mapped = mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
    else:
        # A library that refuses so high a threshold can still be told not to map at all.
        mapped = mallopt(_MMAP_THRESHOLD, _LARGEST) or mallopt(_MMAP_MAX, 0)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, _LARGEST))
