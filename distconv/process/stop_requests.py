"""Signals that ask a training to stop: batch systems send one some time before they end a job.

A signal may reach one rank only, but all ranks must stop after the same step. So the ranks combine what they have
received by an allreduce at each step, which overlaps with the step in a pipeline.
"""

from __future__ import annotations

import signal
import warnings
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from distconv.deprecation import former_names
from distconv.process import watchdog

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a training that has stopped as requested, with a checkpoint from which it can resume."""

_PendingAllreduce = tuple["NDArray[np.int64]", MPI.Request]

_abandoned: list[_PendingAllreduce] = []
"""Pending allreduces of trainings that failed: MPI may still write to their buffers, which must not be freed."""


class PreemptionHandler:
    """Handles SIGTERM and SIGUSR1 while it is entered, whichever rank they reach.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks of the training.
    ahead : int
        Number of steps that one rank may be ahead of another, as in a pipeline. A result is awaited so many calls
        later.
    written : callable
        Returns a count, such as that of the checkpoints that this rank has written. Its minimum over the ranks is sent
        in the same message.
    """

    def __init__(self, comm: MPI.Intracomm, ahead: int, written: Callable[[], int] = lambda: 0) -> None:
        self._comm, self._ahead, self._written = comm, ahead, written
        self._received = False
        self.least_written = 0
        """Minimum of ``written`` over all ranks, as of ``ahead`` calls ago; identical on all ranks."""
        self._answers: deque[_PendingAllreduce] = deque()

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._receive_signal) for each in SIGNALS}
        return self

    def _receive_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def stop_requested(self) -> bool:
        """Return True if a signal had reached any rank ``ahead`` calls ago.

        Collective: call on every rank, once a step.

        Returns
        -------
        bool
            Identical on all ranks.
        """
        # One maximum serves both: that of -n is minus the minimum of n.
        answer = np.array([self._received, -self._written()], dtype=np.int64)
        self._answers.append((answer, self._comm.Iallreduce(MPI.IN_PLACE, answer, MPI.MAX)))
        # The result of `ahead` calls ago: its all-reduce has overlapped with the steps in between.
        return len(self._answers) > self._ahead and self._next()

    def heard(self) -> bool:
        """Return :meth:`stop_requested`, with a warning: this is its former name."""
        warnings.warn("PreemptionHandler.heard is now stop_requested", DeprecationWarning, stacklevel=2)
        return self.stop_requested()

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
            # The other ranks may never make the matching call.
            _abandoned.extend(self._answers)
            return
        while self._answers:
            self._next()


__getattr__ = former_names(__name__, {"StopRequests": "PreemptionHandler"})
