"""Steps of a training that are captured (``--capture``): always, never, or where replays are faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distconv.capture.captured import capture
from distconv.errors import CaptureError

CHOICES = ("auto", "on", "off")

_WORTHWHILE = 100
"""Minimum of remaining steps for which ``auto`` considers a capture, since recording costs a few steps."""

_LONG_S = 1.0
"""Seconds of a step from which on ``auto`` does not capture, since Python's part of the step is too small."""

_MEASURED = 4
"""Measured steps of each variant (eager and captured). The first one is a warm-up and is not counted."""


class AutoCapturedStep:
    """Callable that runs a step eagerly or as a capture. Collective: call it on every rank of ``comm``.

    ``auto`` measures both, decides once, and prints the decision. Replays are bit-identical to eager steps, so that
    results do not depend on the choice. If a step cannot be captured, ``auto`` runs it eagerly, and ``on`` raises
    CaptureError.

    Parameters
    ----------
    function : callable
        The step.
    choice : str
        One of ``CHOICES``.
    comm : mpi4py.MPI.Intracomm
    remaining_steps : callable, optional
        Returns the number of remaining steps. Called at the first step.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        choice: str,
        comm: MPI.Intracomm,
        remaining_steps: Callable[[], int] | None = None,
    ) -> None:
        self._function, self._choice, self._comm, self._to_come = function, choice, comm, remaining_steps
        self._captured: Callable[..., Any] | None = None
        self._seconds: dict[str, list[float]] = {"eager": [], "captured": []}

    def __call__(self, *args: Any) -> Any:
        """Run a step and return the result of ``function``."""
        if self._to_come is not None:
            few = self._to_come() < _WORTHWHILE
            self._choice = "off" if self._choice == "auto" and few else self._choice
            self._to_come = None
        if self._choice == "off":
            return self._function(*args)
        if self._choice == "on":
            return self._replay(args)
        kind = "eager" if len(self._seconds["eager"]) < _MEASURED else "captured"
        began = now()
        try:
            result = self._function(*args) if kind == "eager" else self._replay(args)
        # capture() raises on all ranks or on none, so all of them decide the same.
        except CaptureError as error:
            self._decide("off", f"eager, since {error}")
            return self._function(*args)
        self._seconds[kind].append(now() - began)
        if len(self._seconds[kind]) == _MEASURED:
            self._compare()
        return result

    def _replay(self, args: tuple[Any, ...]) -> Any:
        if self._captured is None:
            self._captured = capture(self._function, *args, on_change="record")
        return self._captured(*args)

    def _compare(self) -> None:
        """Compare the medians of the slowest rank, so that all ranks choose the same. Collective."""
        medians = np.array([statistics.median(seconds[1:] or [0.0]) for seconds in self._seconds.values()])
        self._comm.Allreduce(MPI.IN_PLACE, medians, MPI.MAX)
        eager, captured = medians * 1e3
        # After the eager steps only these are known. A long one ends the comparison, since a recording takes several.
        if not self._seconds["captured"]:
            if eager >= _LONG_S * 1e3:
                self._decide(
                    "off", f"eager: one takes {eager:.1f} ms without the optimizer, of which little is Python's"
                )
            return
        choice = "on" if captured < eager else "off"
        taken = "captured" if choice == "on" else "eager"
        self._decide(choice, f"{taken}: a step without the optimizer takes {eager:.1f} ms, a replay {captured:.1f} ms")

    def _decide(self, choice: str, why: str) -> None:
        self._choice = choice
        self._captured = self._captured if choice == "on" else None
        if self._comm.rank == 0:
            print(f"steps are {why}", flush=True)


def now() -> float:
    """Return the time in seconds after all queued work of the GPU, if there is one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
