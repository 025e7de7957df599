"""Bounds what an allocator that keeps freed memory holds beyond what is in use: the rest goes back to the kernel.

Memory that is kept need not be fetched anew at each step, but blocks of changing sizes leave holes in it, which can
multiply what a process takes. How much is in use an allocator tells only after a walk over all free blocks. So a thread
compares the process's resident memory with what was left of it when free memory was last given back: where it is much
above the most of that, free memory is given back once more. What a step frees and the next one takes again stays, if
it leaves few holes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

HEAP = 1.10, 128 << 20
"""Of glibc's heap: less makes it fetch again within a step what it gave back."""

CACHING = 1.05, 64 << 20
"""Of an allocator that has few holes."""

PAUSE_S = 0.02

FORGET_S = 60.0
"""How long the most that was in use counts: a large network may have been dropped."""


class Bound:
    """Looks now and then whether much is free; ``give_back`` returns free memory to the kernel.

    Resident memory may be ``slack`` times what is in use, and ``free_bytes`` more.
    """

    def __init__(self, give_back: Callable[[], object], slack: float, free_bytes: int) -> None:
        self._give_back, self._slack, self._free_bytes = give_back, slack, free_bytes
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._most = 0
        self._since = time.monotonic()

    def start(self) -> None:
        """Look from now on, in a thread that ends with the process."""
        threading.Thread(target=self._watch, name="distconv-heap-bound", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(PAUSE_S)
            self.look()

    def look(self) -> None:
        """Give free memory back if there may be much."""
        now = time.monotonic()
        if now - self._since > FORGET_S:
            self._since, self._most = now, 0
        if self._resident() > self._slack * self._most + self._free_bytes:
            self._give_back()
            self._most = max(self._most, self._resident())

    def _resident(self) -> int:
        return int(os.pread(self._statm, 64, 0).split()[1]) * self._page
