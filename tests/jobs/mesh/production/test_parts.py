"""Runs on their way into a data set: shared evenly, and named when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.production.parts import Parts, streams

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "x", per_run=2)
    run = streams(1, 0)[0].run(0)
    parts.file(run).write_bytes(b"not a run")
    with pytest.raises(DataError, match=r"train-taylor-green-00000\.npz: damaged"):
        parts.accepted(run)


def test_samples_are_shared_evenly_between_families() -> None:
    wanted = streams(48, 16)
    assert [stream.quota for stream in wanted if stream.split == 0] == [10, 10, 10, 9, 9]
    assert [stream.quota for stream in wanted if stream.split == 1] == [4, 3, 3, 3, 3]
