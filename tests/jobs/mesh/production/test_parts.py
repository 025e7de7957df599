"""Runs on their way into a data set: shared evenly, and named when damaged."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.production.parts import FlowRun, RunFolder, RunStream, streams, write_atomically
from distconv.jobs.mesh.production.run import LabelledSnapshot, RunResult

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


def result(number: int, *, size: int = 16) -> RunResult:
    """A run with as many samples, each of which has other values, and counters that all differ."""
    shape = (size, size)
    samples = [
        LabelledSnapshot(
            np.full((18, *shape), 10 * number + k, np.float32), np.full(shape, k % 2, np.uint8),
            np.full(shape, 0.5 * k, np.float32), time=0.25 * k, step=3 * k, positives=0.125 * (k + number),
            inversions=k + 7,
        )
        for k in range(number)
    ]  # fmt: skip
    return RunResult(
        samples, degraded=number, quiet=2 * number, unfinished=5, steps=11 * number, end_time=0.75, ending="x"
    )


def test_a_run_is_read_as_it_was_stored(tmp_path: Path) -> None:
    parts, run, stored = RunFolder(tmp_path, "x", per_run=2), FlowRun(1, 2, 3), result(2)
    assert parts.accepted(run) is None
    parts.store(run, stored)
    assert [path.name for path in tmp_path.iterdir()] == ["heldout-shear-00003.npz"]
    assert parts.accepted(run) == 2
    found = parts.sample(run, 1)
    for field in dataclasses.fields(found):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(stored.samples[1], field.name))
    counters = dataclasses.asdict(replace(stored, samples=[]))
    assert parts.outline(run).counters == {name: value for name, value in counters.items() if name != "samples"}
    assert (run.number, parts.stop_file) == ((3 * 5 + 2) * 2 + 1, tmp_path / "alarm-x")


def test_runs_are_claimed_by_index_as_long_as_they_are_certainly_needed(tmp_path: Path) -> None:
    parts, other = (RunFolder(tmp_path, "x", per_run=2) for _ in range(2))
    wanted = [RunStream(0, 0, 5), RunStream(1, 3, 2)]
    claimed = [parts.claim(wanted), other.claim(wanted), parts.claim(wanted), other.claim(wanted)]
    # Of the first stream, at most two runs of two samples are in progress, so a third is needed.
    assert claimed == [FlowRun(0, 0, 0), FlowRun(1, 3, 0), FlowRun(0, 0, 1), FlowRun(0, 0, 2)]
    assert parts.claim(wanted) is None
    assert (tmp_path / "train-taylor-green-00000.claim-x").exists()
    parts.store(FlowRun(0, 0, 0), result(0))
    assert other.claim(wanted) == FlowRun(0, 0, 3)
    again = RunFolder(tmp_path, "y", per_run=2)  # after an interruption: what is finished is not claimed
    assert again.claim(wanted) == FlowRun(1, 3, 0) and again.claim(wanted) == FlowRun(0, 0, 1)


def test_a_stream_that_yields_too_little_is_an_error(tmp_path: Path) -> None:
    parts = RunFolder(tmp_path, "x", per_run=2, most_runs=2)
    wanted = [RunStream(0, 1, 3)]
    for index, samples in enumerate((1, 1)):
        parts.check(wanted)
        parts.store(FlowRun(0, 1, index), result(samples))
    message = "2 simulations of 'vortices' gave 2 of 3 samples. Use a larger mesh"
    with pytest.raises(DataError, match=message):
        parts.check(wanted)
    parts.check([replace(wanted[0], quota=2)])
    assert RunFolder(tmp_path, "x", per_run=2).most_runs == 40


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone/x: cannot write 3 bytes"):
        write_atomically(tmp_path / "gone" / "x", b"abc")
