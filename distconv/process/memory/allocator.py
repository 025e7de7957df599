"""How this process keeps memory, so that large activations are not requested from the kernel again at each step.

The best way is an allocator that keeps freed blocks (:mod:`.caching_allocators`), with which a command starts.
Otherwise glibc is set to keep more free memory at the top of its heap. Larger blocks are still mapped individually, and
torch asks for huge pages for them: in the heap they would leave holes. ``DISTCONV_MALLOC`` overrides both.
"""

from __future__ import annotations

import ctypes
import os

from distconv.process.environment import MALLOC
from distconv.process.memory import caching_allocators

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAPPED_BYTES, _FREE_BYTES = 32 << 20, 256 << 20
"""Size from which blocks are mapped individually, and size that may stay free at the top of the heap.

Without these settings, glibc raises its threshold for mapping to at most 32 MiB, the first value, as large blocks are
freed. It then keeps at most twice the threshold, 64 MiB, at the top of the heap.
"""

KINDS = {
    "heap": "up to 256 MiB that are free stay in the heap",
    "system": "as the C library has it",
}

kind = "system"
"""Which of ``KINDS`` this process has, or the name of the allocator that it was started with."""


def keeps_memory(ranks: int) -> bool:
    """Return True if memory is to be kept: as ``DISTCONV_MALLOC`` says, otherwise in a job of more than one rank."""
    asked = MALLOC.value()
    return ranks > 1 if asked is None else asked != "0"


def keep_memory(ranks: int) -> str:
    """Set up glibc's allocator to keep memory, if that is wanted and no better allocator is loaded.

    Parameters
    ----------
    ranks : int
        Number of ranks of the job.

    Returns
    -------
    str
        The resulting ``kind``.
    """
    global kind
    kind = caching_allocators.loaded_allocator() or (_set() if keeps_memory(ranks) else "system")
    return kind


def describe() -> str:
    """Return a description of ``kind``, and a hint for a better one if this process has none of the allocators."""
    if kind in caching_allocators.FILES:
        return f"{kind}: freed blocks are kept for about a second"
    better = caching_allocators.find_installed()
    hint = (
        f"start it by `distconv run` for {better[0]}" if better else "install tcmalloc, jemalloc or distconv[allocator]"
    )
    return f"{KINDS[kind]}; {hint}, which keeps freed blocks"


def environment(of: str) -> dict[str, str]:
    """Return the variables that a process needs at its start for a kind of ``KINDS`` or an allocator.

    Empty for ``"system"``, and for an allocator that is not installed.
    """
    if of == "heap":
        sizes = {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES), "MALLOC_TRIM_THRESHOLD_": str(_FREE_BYTES)}
        return {**sizes, "THP_MEM_ALLOC_ENABLE": "1"}
    library = caching_allocators.find_installed(of) if of in caching_allocators.FILES else None
    return {**caching_allocators.SETTINGS.get(of, {}), "LD_PRELOAD": str(library[1])} if library else {}


def _set() -> str:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return "system"
    # torch reads this when it first allocates a tensor: a script that has made one has blocks in small pages.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Not smaller: with blocks mapped from 1 MiB on, layers of medium size took twice as long.
    told = mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES) and mallopt(_TRIM_THRESHOLD, _FREE_BYTES)
    return "heap" if told else "system"
