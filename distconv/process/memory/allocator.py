"""How this process's memory is kept, so that large activations are not fetched anew from the kernel at each step.

Best is an allocator that keeps freed blocks (:mod:`.caching_allocators`). Two settings of glibc's serve else. Where the
kernel offers transparent huge pages, blocks above a megabyte are mapped by themselves in pages of 2 MB and given back
when freed: no holes, cheap where fresh pages are. Else everything stays in the heap. A fresh block and a kept one are
timed to choose between them: a hypervisor may hand out pages slowly, and torch asks for huge ones only if it was told
before its first tensor. ``DISTCONV_MALLOC`` has the last word.

Whatever keeps freed memory is bounded (:mod:`.bound`). glibc before 2.39 needs that most: of an aligned block, as all
of torch's are, it puts the few bytes that it cuts off into a cache of the thread, whose next small block then lies
beside the large one and keeps it from being taken again (its bug 30723).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from distconv.process.environment import MALLOC
from distconv.process.memory import bound, caching_allocators

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_LARGEST = (1 << 31) - 1
"""What mallopt can take."""
_SYSTEM = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20, _MMAP_MAX: 65536}
"""What glibc's own settings come to in a process with large blocks (mallopt(3))."""
_MAPPED_BYTES = 1 << 20
"""Blocks from here on are mapped by themselves where there are huge pages."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_TRIAL_BYTES, _TRIALS = 4 << 20, 5
DEAR = 4.0
"""Where writing to a fresh block takes so many times as long as to a kept one, none is given back."""

KINDS = {
    "pages": "large blocks mapped in huge pages, given back when freed",
    "heap": "what is freed stays in the heap",
    "system": "as the C library has it",
}

BOUNDS = {"heap": bound.HEAP, **dict.fromkeys(caching_allocators.FILES, bound.CACHING)}

kind = "system"
"""Which of ``KINDS``, or allocator that was taken in, this process has."""


def wanted(ranks: int) -> bool:
    """Whether memory is to be kept: as asked for, else with more than one rank."""
    asked = MALLOC.value()
    return ranks > 1 if asked is None else asked != "0"


def keep_memory(ranks: int) -> str:
    """Set the allocator if asked to or with more than one rank; returns ``kind``."""
    global kind
    kind = caching_allocators.loaded() or (_set() if wanted(ranks) else "system")
    if kind in caching_allocators.FILES and MALLOC.value() != "0":
        give_back = caching_allocators.give_back(kind)
        if give_back:
            bound.Bound(give_back, *bound.CACHING).start()
    return kind


def describe() -> str:
    """What this process has, and what would be better."""
    if kind in caching_allocators.FILES:
        return f"{kind}: freed blocks are kept{may_be_free()}"
    better = caching_allocators.installed()
    hint = (
        f"start it by `distconv run` for {better[0]}" if better else "install tcmalloc, jemalloc or distconv[allocator]"
    )
    return f"{KINDS[kind]}{may_be_free()}; {hint}, which has fewer holes"


def may_be_free() -> str:
    """How much of the process's memory may be free, in words that follow others."""
    if kind not in BOUNDS:
        return ""
    slack, free_bytes = BOUNDS[kind]
    return f", up to about {slack - 1:.0%} of what is in use and {free_bytes >> 20} MiB"


def environment(of: str) -> dict[str, str]:
    """What a process yet to be started needs in its environment for a kind, or for an allocator that is installed."""
    if of == "heap":
        return {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(_LARGEST)}
    if of == "pages":
        pages = {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES), "THP_MEM_ALLOC_ENABLE": "1"}
        return {**pages, "MALLOC_TRIM_THRESHOLD_": str(_LARGEST)}
    library = caching_allocators.installed(of) if of in caching_allocators.FILES else None
    return {**caching_allocators.SETTINGS.get(of, {}), "LD_PRELOAD": str(library[1])} if library else {}


def huge_pages() -> bool:
    """Whether the kernel gives huge pages to memory that asks for them."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False


def _set() -> str:
    try:
        libc = ctypes.CDLL(None)
        mallopt, trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        return "system"
    if huge_pages() and fresh_over_kept(_mapped) < DEAR:
        # torch reads this when it first allocates a tensor: too late if a script has made one.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        told = mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES) and mallopt(_TRIM_THRESHOLD, _LARGEST)
        if told and fresh_over_kept(lambda: torch.empty(_TRIAL_BYTES, dtype=torch.uint8)) < DEAR:
            return "pages"
    # A library that refuses so high a threshold can still be told not to map at all.
    kept = mallopt(_MMAP_THRESHOLD, _LARGEST) or mallopt(_MMAP_MAX, 0)
    if not (kept and mallopt(_TRIM_THRESHOLD, _LARGEST)):
        return "system"
    bound.Bound(lambda: trim(0), *bound.HEAP).start()
    return "heap"


def give_back_freed() -> None:
    """Let large blocks go back to the kernel as they are freed, as the C library has it, unless memory is to be kept.

    For work in which what is kept for the next step would be beside the most that is in use.
    """
    global kind
    if kind == "heap" and MALLOC.value() is None:
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _SYSTEM.items():
            mallopt(parameter, value)
        kind = "system"


def _mapped() -> torch.Tensor:
    """A block fresh from the kernel, in huge pages."""
    block = mmap.mmap(-1, _TRIAL_BYTES)
    block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


def fresh_over_kept(block: Callable[[], torch.Tensor]) -> float:
    """How many times as long writing to a fresh block takes as writing to it again."""
    blocks = (block() for _ in range(_TRIALS))
    return statistics.median(_write_time(x) / _write_time(x) for x in blocks)


def _write_time(x: torch.Tensor) -> float:
    started = time.perf_counter()
    ctypes.memset(x.data_ptr(), 1, x.nbytes)  # by one thread
    return time.perf_counter() - started
