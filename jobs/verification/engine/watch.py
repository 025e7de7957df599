"""A time limit on each case of a run. A case that hangs is named and ends the job."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

HANG = 75
"""Exit code of a job that stopped in a case."""


class Watch:
    """Aborts the job if a case takes longer than ``limit_s``. Each rank prints its case before."""

    def __init__(self, comm: MPI.Intracomm, limit_s: float) -> None:
        self._rank, self._limit_s = comm.rank, limit_s
        self.case = ""
        """Case that this rank computes; may be extended meanwhile."""
        self._since = time.monotonic()

    def begin(self, case: str) -> None:
        """Begin a case and its time limit."""
        self._since, self.case = time.monotonic(), case

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the cases that begin inside the context."""
        done = threading.Event()
        self.begin(self.case)
        threading.Thread(target=self._watch, args=(done,), daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(1.0):
            if time.monotonic() - self._since > self._limit_s:
                print(f"HANG: rank {self._rank}: {self.case}", file=sys.stderr, flush=True)
                time.sleep(2.0)  # the other ranks print their cases, too
                MPI.COMM_WORLD.Abort(HANG)
