"""Runs on their way into a data set: shared evenly, and named when damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.production.parts import FlowRun, RunFolder, streams

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    parts = RunFolder(tmp_path, "x", per_run=2)
    run = streams(1, 0)[0].run(0)
    parts.file(run).write_bytes(b"not a run")
    with pytest.raises(DataError, match=r"train-taylor-green-00000\.npz: damaged"):
        parts.accepted(run)


def test_samples_are_shared_evenly_between_families() -> None:
    wanted = streams(48, 16)
    assert [stream.quota for stream in wanted if stream.split == 0] == [10, 10, 10, 9, 9]
    assert [stream.quota for stream in wanted if stream.split == 1] == [4, 3, 3, 3, 3]


def test_the_last_run_gives_its_latest_samples() -> None:
    parts = RunFolder(Path("nowhere"), "x", per_run=4)
    (stream,) = streams(3, 0)[:1]
    stream = replace(stream, quota=5)
    counts = {0: 2, 1: 0, 2: 4, 3: 4}
    parts.accepted = lambda run: counts.get(run.index)  # type: ignore[method-assign]
    used = [(run.index, list(taken)) for run, taken in parts.used_runs(stream)]
    assert used == [(0, [0, 1]), (1, []), (2, [1, 2, 3])]
    assert parts.available_samples(stream) == 5


def test_every_run_has_a_number_and_random_numbers_of_its_own() -> None:
    runs = [FlowRun(split, family, index) for split in range(2) for family in range(5) for index in range(3)]
    assert len({run.number for run in runs}) == len(runs) == len({run.name for run in runs})
    assert len({run.seed(7).generate_state(1)[0] for run in runs}) == len(runs)
    assert runs[0].seed(7).generate_state(1)[0] != runs[0].seed(8).generate_state(1)[0]
