"""How this process's memory is kept, so that large activations are not fetched again from the kernel at each step.

Best is an allocator that keeps freed blocks (:mod:`.caching_allocators`), which a command starts with. Else, where the
kernel offers transparent huge pages, glibc is told to map blocks above a megabyte by themselves, and torch to ask for
pages of 2 MB: fresh memory then costs less, and freed blocks leave no holes. ``DISTCONV_MALLOC`` has the last word.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from distconv.process.environment import MALLOC
from distconv.process.memory import caching_allocators

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1
"""The largest value that mallopt takes."""
_MAPPED_BYTES = 1 << 20
"""Blocks from here on are mapped by themselves where there are huge pages."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

KINDS = {
    "pages": "large blocks mapped in huge pages, given back when freed",
    "system": "as the C library has it",
}

kind = "system"
"""Which of ``KINDS`` this process has, or which allocator it was started with."""


def wanted(ranks: int) -> bool:
    """Return True if memory is to be kept: as ``DISTCONV_MALLOC`` says, else with more than one rank."""
    asked = MALLOC.value()
    return ranks > 1 if asked is None else asked != "0"


def keep_memory(ranks: int) -> str:
    """Set glibc's allocator if that is wanted; returns ``kind``."""
    global kind
    kind = caching_allocators.loaded() or (_set() if wanted(ranks) else "system")
    return kind


def describe() -> str:
    """Return the kind in words, and what would be better."""
    if kind in caching_allocators.FILES:
        return f"{kind}: freed blocks are kept for about a second"
    better = caching_allocators.installed()
    hint = (
        f"start it by `distconv run` for {better[0]}" if better else "install tcmalloc, jemalloc or distconv[allocator]"
    )
    return f"{KINDS[kind]}; {hint}, which keeps freed blocks"


def environment(of: str) -> dict[str, str]:
    """Return the variables that a process needs when it starts for a kind, or for an allocator that is installed."""
    if of == "pages":
        pages = {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES), "THP_MEM_ALLOC_ENABLE": "1"}
        return {**pages, "MALLOC_TRIM_THRESHOLD_": str(_LARGEST)}
    library = caching_allocators.installed(of) if of in caching_allocators.FILES else None
    return {**caching_allocators.SETTINGS.get(of, {}), "LD_PRELOAD": str(library[1])} if library else {}


def huge_pages() -> bool:
    """Return True if the kernel gives huge pages to memory that asks for them."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False


def _set() -> str:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return "system"
    if not huge_pages():
        return "system"
    # torch reads this when it first allocates a tensor: a script that has made one has blocks in small pages.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    told = mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES) and mallopt(_TRIM_THRESHOLD, _LARGEST)
    return "pages" if told else "system"
