"""Compares outcomes across the ranks of a test job, over a communicator that no test sees."""

from __future__ import annotations

import os
import time
from typing import NoReturn

from mpi4py import MPI

from tests.harness.records import OUTCOMES

PATIENCE_S = 5.0
"""How long a rank whose test failed waits for the others: they may be blocked in a message that it never sent."""

LONE_FAILURE = 1
TIME_LIMIT = 75


class World:
    """All ranks of this job. ``comm`` is what tests get: a duplicate, renewed after a failure on all ranks."""

    def __init__(self) -> None:
        self._private = MPI.COMM_WORLD.Dup()
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank = self._private.rank
        self.size = self._private.size

    def outcomes(self, mine: str) -> list[str] | None:
        """Every rank's outcome; None if this rank failed and the others do not come."""
        codes = bytearray(self.size)
        request = self._private.Iallgather([bytearray([OUTCOMES.index(mine)]), MPI.BYTE], [codes, MPI.BYTE])
        until = time.monotonic() + PATIENCE_S if mine == "failed" else float("inf")
        # Asks rather than waits: with more ranks than cores a rank that spins takes the time of one that works.
        pause = 0.0
        while not request.Test():
            if time.monotonic() > until:
                return None
            time.sleep(pause)
            pause = min(pause + 2e-5, 2e-3)
        return [OUTCOMES[code] for code in codes]

    def same(self, digest: bytes) -> bool:
        """Return True if all ranks passed the same bytes."""
        return len(set(self._private.allgather(digest))) == 1

    def renew(self) -> None:
        """Give the tests a fresh communicator: messages of a failed test may still wait on the old one."""
        self.comm = MPI.COMM_WORLD.Dup()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._private.Barrier()

    def abort(self, code: int) -> NoReturn:
        """End all ranks."""
        time.sleep(0.3)  # the launcher passes on what was printed, but nothing once it ends the job
        try:
            MPI.COMM_WORLD.Abort(code)
        finally:
            # It may return before the launcher kills this process, which must not go on to its next test.
            time.sleep(10.0)
            os._exit(code)
