"""Traces: run the profiler on all ranks for a block of code (``trace``), or for some steps of a training job.

::

    with dc.trace("runs/trace") as traced:
        for number in range(3):
            with traced.step(number):
                step()
    print(traced.table())

::

    FOLDER/rank-0.json ...    torch.profiler's trace of each rank, with ``distributedInfo``: a folder for
                              HolisticTraceAnalysis; open single ranks in chrome://tracing
    FOLDER/merged/trace.json  the traces of all ranks on a common clock, for Perfetto
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from mpi4py import MPI
from torch.profiler import ProfilerActivity, profile, record_function

from distconv.communication.agreement import check_communicator, check_same_on_all_ranks, try_on_all_ranks
from distconv.deprecation import former_names
from distconv.errors import DataError
from distconv.process import watchdog
from distconv.tracing import breakdown, chrome
from distconv.whole_files import Folder, write_file

MERGED = Path("merged", "trace.json")
"""Path of the merged trace in the folder."""


class TraceResult:
    """The result of a trace.

    Attributes
    ----------
    folder : Path
        The folder with the traces.
    ranks : list of Breakdown
        The breakdown of each rank's time, on every rank; empty until the block has ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[breakdown.Breakdown] = []
        self._steps = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark the block as step ``number`` in the trace.

        Parameters
        ----------
        number : int
            Number of the training step, from 0.

        Returns
        -------
        context manager
        """
        self._steps += 1
        with record_function(f"ProfilerStep#{number}"):
            yield

    def table(self) -> str:
        """Return a table of the time of each rank.

        Returns
        -------
        str
            Milliseconds per step (or of the full trace if no step is marked), and a sentence about slow ranks.
        """
        return breakdown.format_table(self.ranks, max(1, self._steps))


@contextmanager
def trace(folder: str | os.PathLike[str], comm: MPI.Intracomm | None = None) -> Iterator[TraceResult]:
    """Trace the block on every rank, and write the traces at its end.

    Tracing costs a few microseconds for each operator. If the block raises, nothing is written.

    Collective: enter and leave the block on every rank of ``comm``.

    Parameters
    ----------
    folder : str or path-like
        The folder for the traces, which is created. Traces of an earlier run in it are deleted.
    comm : MPI.Intracomm, optional
        The ranks (default: ``MPI.COMM_WORLD``).

    Yields
    ------
    TraceResult
        Marks steps inside the block, and has the results after it.

    Raises
    ------
    DataError
        On every rank, if the folder cannot be created or a trace cannot be written.
    MismatchError
        On every rank, if ranks pass different folders.

    Examples
    --------
    >>> with dc.trace("runs/trace") as traced:     # doctest: +SKIP
    ...     with traced.step(0):
    ...         model(x).sum().backward()
    >>> print(traced.table())                      # doctest: +SKIP
    """
    comm = comm or MPI.COMM_WORLD
    check_communicator(comm, "trace")
    check_same_on_all_ranks(comm, "trace", str(folder))
    traced = TraceResult(Path(folder))
    try_on_all_ranks(comm, lambda: _make_folder(traced.folder) if comm.rank == 0 else None, DataError)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        # As torch writes it if its own process groups are used.
        backend = "nccl" if torch.cuda.is_available() else "mpi"
        info = {"backend": backend, "rank": comm.rank, "world_size": comm.size, "pg_count": 1}
        profiler.add_metadata_json("distributedInfo", json.dumps(info))
        # The clocks of ranks differ. All of them leave the barrier at the same moment, the origin of the merged trace.
        with watchdog.waiting(lambda: "the beginning of a trace"):
            comm.Barrier()
        with record_function(chrome.BEGIN):
            pass
        yield traced
        if torch.cuda.is_available():
            # Kernels that are still running belong to the block.
            torch.cuda.synchronize()
        with record_function(breakdown.END):
            pass
    mine = try_on_all_ranks(comm, lambda: _export(profiler, traced.folder / f"rank-{comm.rank}.json"), DataError)
    with watchdog.waiting(lambda: "the traces of all ranks"):
        traced.ranks = comm.allgather(breakdown.breakdown(mine, comm.rank))
        # Only to rank 0, which writes them: traces are large.
        traces = comm.gather(mine)
    try_on_all_ranks(
        comm,
        lambda: write_file(traced.folder / MERGED, json.dumps(chrome.merge_traces(traces))) if traces else None,
        DataError,
    )


def _make_folder(folder: Path) -> None:
    """Create the folder, and delete the traces of an earlier run."""
    with Folder(folder, make=True) as out, Folder(MERGED.parent.name, make=True, within=out):
        for name in out.names():
            if re.fullmatch(r"rank-\d+\.json", name):
                out.remove(name)


def _export(profiler: profile, path: Path) -> chrome.Trace:
    """Write the profiler's trace to ``path`` atomically, and return it."""
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch, "trace.json")
        # The profiler writes to a path of its own. Only then is the complete text written, atomically.
        profiler.export_chrome_trace(str(where))
        text = where.read_text()
    write_file(path, text)
    exported: chrome.Trace = json.loads(text)
    return exported


# -- selected steps of a training job ---------------------------------------------------------------------------------


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
        # The last selected step: later ones are not slowed down by the profiler.
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


__getattr__ = former_names(__name__, {"Traced": "TraceResult"})
