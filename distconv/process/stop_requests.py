"""Signals that ask a training to stop: batch systems send one some time before they end a job."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from distconv.process import watchdog

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

EXIT_CODE = 128 + signal.SIGTERM
"""Of a training that has stopped as asked, with a checkpoint from which it can go on."""

_Answer = tuple["NDArray[np.int64]", MPI.Request]

_abandoned: list[_Answer] = []
"""Of trainings that failed: MPI may still write to them."""


class StopRequests:
    """Takes the signals while it is entered, whichever rank they reach."""

    def __init__(self, comm: MPI.Intracomm, ahead: int, written: Callable[[], int] = lambda: 0) -> None:
        """``ahead``: steps that ranks may be ahead of others, which no answer waits for.

        ``written`` is asked at each call, and what it says goes with the same message.
        """
        self._comm, self._ahead, self._written = comm, ahead, written
        self._heard = False
        self.least_written = 0
        """The least that ``written`` said on any rank, ``ahead`` calls ago; the same on all ranks."""
        self._answers: deque[_Answer] = deque()

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._hear) for each in SIGNALS}
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True

    def heard(self) -> bool:
        """Whether a rank had heard of one, ``ahead`` calls ago; the same on all ranks. Collective."""
        answer = np.array([self._heard, -self._written()], dtype=np.int64)
        self._answers.append((answer, self._comm.Iallreduce(MPI.IN_PLACE, answer, MPI.MAX)))
        return len(self._answers) > self._ahead and self._next()

    def _next(self) -> bool:
        answer, request = self._answers.popleft()
        with watchdog.waiting(lambda: "asking whether a signal has reached any rank"):
            request.Wait()
        self.least_written = -int(answer[1])
        return bool(answer[0])

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        if kind is not None:
            _abandoned[:] = [answer for answer in _abandoned if not answer[1].Test()]
            _abandoned.extend(self._answers)
            return
        while self._answers:
            self._next()
