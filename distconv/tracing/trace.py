"""``trace``: the profiler of each rank, over a stretch that all of them enter and leave together.

    with dc.trace("runs/trace") as traced:
        for number in range(3):
            with traced.step(number):
                step()
    print(traced.table())

::

    FOLDER/rank-0.json ...    what torch.profiler has of each rank, with ``distributedInfo``: a folder for
                              HolisticTraceAnalysis, or for chrome://tracing rank by rank
    FOLDER/merged/trace.json  all of them on one clock, for Perfetto
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from mpi4py import MPI
from torch.profiler import ProfilerActivity, profile, record_function

from distconv.communication.agreement import check_communicator, check_same_on_all_ranks, try_on_all_ranks
from distconv.errors import DataError
from distconv.process import watchdog
from distconv.tracing import breakdown, chrome
from distconv.whole_files import Folder, write_file

MERGED = Path("merged", "trace.json")


class Traced:
    """What was traced, once its block has ended: ``ranks`` has the parts of each rank's time, on every rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[breakdown.Breakdown] = []
        self._steps = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, which has its ``number`` in the trace."""
        self._steps += 1
        with record_function(f"ProfilerStep#{number}"):
            yield

    def table(self) -> str:
        """Milliseconds of each part by rank, for each step if there were any, and which rank is slow."""
        return breakdown.table(self.ranks, max(1, self._steps))


@contextmanager
def trace(folder: str | os.PathLike[str], comm: MPI.Intracomm | None = None) -> Iterator[Traced]:
    """Trace what this rank does inside, and write it to ``folder`` behind it. Collective over ``comm`` (all ranks).

    Tracing costs some microseconds for each operator. If the block raises, nothing is written.

    Raises
    ------
    DataError
        On all ranks, if the folder cannot be made or a trace cannot be written.
    MismatchError
        If the ranks name different folders.
    """
    comm = comm or MPI.COMM_WORLD
    check_communicator(comm, "trace")
    check_same_on_all_ranks(comm, "trace", str(folder))
    traced = Traced(Path(folder))
    try_on_all_ranks(comm, lambda: _make(traced.folder) if comm.rank == 0 else None, DataError)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        profiler.add_metadata_json("distributedInfo", _distributed(comm))
        _meet(comm)
        with record_function(chrome.BEGIN):
            pass
        yield traced
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with record_function(breakdown.END):
            pass
    mine = try_on_all_ranks(comm, lambda: _exported(profiler, traced.folder / f"rank-{comm.rank}.json"), DataError)
    with watchdog.waiting(lambda: "the traces of all ranks"):
        traced.ranks = comm.allgather(breakdown.breakdown(mine, comm.rank))
        traces = comm.gather(mine)
    try_on_all_ranks(comm, lambda: _write_merged(traced.folder, traces), DataError)


def _make(folder: Path) -> None:
    """The folder, without the ranks of an earlier trace."""
    with Folder(folder, make=True) as out, Folder(MERGED.parent.name, make=True, within=out):
        for name in out.names():
            if re.fullmatch(r"rank-\d+\.json", name):
                out.remove(name)


def _distributed(comm: MPI.Intracomm) -> str:
    """What torch writes into a trace where its own process groups are at work."""
    backend = "nccl" if torch.cuda.is_available() else "mpi"
    return json.dumps({"backend": backend, "rank": comm.rank, "world_size": comm.size, "pg_count": 1})


def _meet(comm: MPI.Intracomm) -> None:
    with watchdog.waiting(lambda: "the beginning of a trace"):
        comm.Barrier()


def _write_merged(folder: Path, traces: Sequence[chrome.Trace] | None) -> None:
    """On rank 0, which has all of them."""
    if traces is not None:
        write_file(folder / MERGED, json.dumps(chrome.merged(traces)))


def _exported(profiler: profile, path: Path) -> chrome.Trace:
    """The trace as torch writes it, written to ``path`` whole."""
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch, "trace.json")
        profiler.export_chrome_trace(str(where))
        text = where.read_text()
    write_file(path, text)
    exported: chrome.Trace = json.loads(text)
    return exported
