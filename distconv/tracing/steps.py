"""Tracing selected steps of a training job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from mpi4py import MPI

from distconv.tracing.trace import TraceResult, trace


class StepTrace:
    """A trace of selected training steps; at its end, rank 0 prints the breakdown of the time.

    Use it as a context manager around the training loop. If a traced step raises, the trace ends without communication.

    Parameters
    ----------
    steps : range or None
        The steps to trace, without gaps; ``None`` for no step. Identical on all ranks. After a gap a new trace would
        begin, and delete the files of the first one.
    folder : Path
        Where traces are written.
    comm : MPI.Intracomm
        The ranks.
    """

    def __init__(self, steps: range | None, folder: Path, comm: MPI.Intracomm) -> None:
        self._steps, self._folder, self._comm = steps or range(0), folder, comm
        self._open = ExitStack()
        self._traced: TraceResult | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run step ``number`` inside the block, traced if it is selected.

        Collective where a trace begins or ends.

        Parameters
        ----------
        number : int
            Number of the training step, from 0.

        Returns
        -------
        context manager
        """
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
