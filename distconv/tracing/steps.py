"""Some of the steps of a training, traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from mpi4py import MPI

from distconv.tracing.trace import Traced, trace


class StepTrace:
    """Traces the steps whose numbers are in ``steps``, if any, into ``folder``, and has rank 0 print where time went.

    A block around the training: what goes wrong in a traced step ends the trace without a message to other ranks.
    """

    def __init__(self, steps: range | None, folder: Path, comm: MPI.Intracomm) -> None:
        self._steps, self._folder, self._comm = steps or range(0), folder, comm
        self._open = ExitStack()
        self._traced: Traced | None = None

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Around step ``number``. Collective where a trace begins or ends."""
        if number not in self._steps:
            yield
            return
        if self._traced is None:
            self._traced = self._open.enter_context(trace(self._folder, self._comm))
        with self._traced.step(number):
            yield
        if number + 1 not in self._steps:
            self._finish()

    def _finish(self) -> None:
        self._open.close()
        if self._traced is not None and self._comm.rank == 0:
            print(f"trace: {self._folder}\n{self._traced.table()}")
        self._traced = None

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> Any:
        if error is None:
            self._finish()
            return None
        return self._open.__exit__(kind, error, at)
