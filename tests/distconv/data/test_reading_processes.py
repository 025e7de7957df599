"""Reading processes: as fast as their number says, without MPI and torch, and one that ends is an error in its step."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distconv as dc
from distconv.data import BoxFunction, Field, Loader, ReadByProcesses, reading_processes
from distconv.errors import DataError
from tests.distconv.data import stored_samples
from tests.distconv.data.sample_files import common

pytestmark = pytest.mark.ranks(1, 2)


def of(comm: Any, function: Any, readers: int, samples: int = 32) -> ReadByProcesses:
    return ReadByProcesses(BoxFunction({"x": (samples, 4)}, function, comm), readers)


def seconds(comm: Any, readers: int) -> float:
    with of(comm, stored_samples.slow, readers) as source:
        loader = Loader(source, [Field("x", "nw")], dc.ProcessGrid(comm, w=comm.size), 1, ahead=readers)
        start = time.perf_counter()
        seen = [float(dc.gather(batch.tensors[0])[0, 0]) for batch in loader.epoch(0)]
        assert sorted(seen) == list(range(32)) and seen == [float(sample) for sample in loader.order(0)]
        return time.perf_counter() - start


@pytest.mark.long
@pytest.mark.ranks(1)
def test_eight_readers_are_five_times_as_fast_as_one(comm: Any) -> None:
    one, eight = seconds(comm, 1), seconds(comm, 8)
    assert one > 32 * 0.05
    assert one / eight >= 5, (one, eight)


def test_they_have_neither_mpi_nor_torch(comm: Any) -> None:
    with of(comm, stored_samples.which_modules, 2) as source:
        assert source.read("x", (dc.Interval(0, 1), dc.Interval(0, 4))).tolist() == [[0.0] * 4]


def test_one_that_ends_is_an_error_on_all_ranks(comm: Any) -> None:
    with of(comm, stored_samples.dies, 2) as source:
        loader = Loader(source, [Field("x", "nw")], dc.ProcessGrid(comm, w=comm.size), 1, shuffle=False)
        steps = 0
        with pytest.raises(DataError) as caught:
            for _ in loader.epoch(0):
                steps += 1
    assert steps == 2 and "a reading process has ended" in common(comm, caught.value)


def test_what_cannot_be_imported_there_is_refused(comm: Any) -> None:
    with pytest.raises(DataError, match="cannot be sent to reading processes"):
        of(comm, lambda name, box: np.zeros(1), 2)
    with pytest.raises(DataError, match="0 reading processes; ask for at least one"):
        of(comm, stored_samples.slow, 0)


def test_an_error_of_the_function_is_that_of_one_process(comm: Any) -> None:
    with of(comm, os.path.join, 1) as source, pytest.raises(DataError, match=r"join: 'x' of \[0:1, 0:4\]: TypeError"):
        source.read("x", (dc.Interval(0, 1), dc.Interval(0, 4)))


def test_none_is_left_behind(comm: Any, tmp_path: Path) -> None:
    source = of(comm, stored_samples.slow, 3)
    server = source._server.pid
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    assert len(children) == 3
    source.close()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in [server, *children]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


@pytest.mark.long
@pytest.mark.ranks(1)
def test_they_end_with_a_rank_that_is_killed(comm: Any, tmp_path: Path) -> None:
    script = (
        "import os, signal, pathlib; from distconv.data import *; from tests.distconv.data import stored_samples\n"
        "source = ReadByProcesses(BoxFunction({'x': (4, 4)}, stored_samples.slow), 2)\n"
        "server = source._server.pid\n"
        "print(server, pathlib.Path(f'/proc/{server}/task/{server}/children').read_text(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    from distconv.process.launchers import environment_without_launcher

    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment_without_launcher(), timeout=50
    )
    children = run.stdout.split()
    assert len(children) == 3, run.stderr
    deadline = time.monotonic() + 20
    alive = children
    while alive and time.monotonic() < deadline:
        alive = [child for child in children if Path(f"/proc/{child}").exists()]
        time.sleep(0.05)
    assert not alive


@pytest.mark.ranks(1)
def test_what_is_left_of_an_answer_is_never_taken_for_another(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("no room for the values")

    with of(comm, stored_samples.slow, 1) as source:
        with monkeypatch.context() as patched:
            patched.setattr(reading_processes, "receive_into", fails)
            with pytest.raises(MemoryError):
                source.read("x", (dc.Interval(1, 2), dc.Interval(0, 4)))
        with pytest.raises(DataError, match="a reading process has ended; look for the reason above"):
            source.read("x", (dc.Interval(2, 3), dc.Interval(0, 4)))
