"""Ends a test that takes too long: dumps all stacks, then stops the job.

A thread, because a signal handler never runs while the main thread is blocked in MPI. Behind it stands faulthandler's
own timer, which needs no interpreter lock, for code that hangs while holding it.
"""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

BACKSTOP_S = 15.0
PYTEST_FRAMES = ("site-packages/pluggy/", "site-packages/_pytest/", "tests/harness/rank.py")


class Watchdog:
    """Calls ``stop(stacks, limit_s)`` from its thread when a guarded block runs over its limit."""

    def __init__(self, stop: Callable[[str, float], None], output: TextIO) -> None:
        self._stop = stop
        self._output = output
        self._deadline: tuple[float, float] | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def guard(self, limit_s: float) -> Iterator[None]:
        """Give the block ``limit_s`` seconds."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="test-watchdog", daemon=True)
            self._thread.start()
        faulthandler.dump_traceback_later(limit_s + BACKSTOP_S, exit=True, file=self._output)
        self._set((time.monotonic() + limit_s, limit_s))
        try:
            yield
        finally:
            self._set(None)
            faulthandler.cancel_dump_traceback_later()

    def _set(self, deadline: tuple[float, float] | None) -> None:
        with self._changed:
            self._deadline = deadline
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while True:
                if self._deadline is None:
                    self._changed.wait()
                    continue
                when, limit_s = self._deadline
                left = when - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    self._stop(stacks(), limit_s)
                    self._deadline = None


def stacks() -> str:
    """The stacks of all threads of this process, without pytest's own frames."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return "".join(line for line in file if not any(frame in line for frame in PYTEST_FRAMES))
