"""Manifests say which step is the newest, and reach no files elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from distconv import checkpoint
from distconv.checkpoint.manifest import MANIFEST
from tests.distconv.checkpoint.damage import VALUES, on_rank_0, refused, rewritten, tensors, warned

pytestmark = pytest.mark.ranks(1, 2, 4)


@pytest.mark.fault(75)
def test_the_newest_is_what_was_committed_last_whatever_its_time_or_step(comm: Any, shared_tmp_path: Path) -> None:
    assert checkpoint.newest(shared_tmp_path / "nothing", comm) is None
    for step in (9, 1000000):
        folder = checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm, keep=9)
        on_rank_0(comm, lambda folder=folder: os.utime(folder / MANIFEST, (0, 0)))
    assert checkpoint.newest(shared_tmp_path, comm) == shared_tmp_path / "step-1000000"
    with warned(comm, "step-000020 has an earlier step than step-1000000"):
        folder = checkpoint.save(shared_tmp_path, 20, tensors(), VALUES, comm, keep=9)
    on_rank_0(comm, lambda: os.utime(folder / MANIFEST, (0, 0)))
    assert checkpoint.newest(shared_tmp_path, comm) == folder
    # Saved again, a step is the last to be committed.
    with warned(comm, "step-000009 has an earlier step than step-000020"):
        checkpoint.save(shared_tmp_path, 9, tensors(), VALUES, comm, keep=9)
    assert checkpoint.newest(shared_tmp_path, comm) == shared_tmp_path / "step-000009"


def test_those_from_before_commits_were_numbered_come_first_by_their_steps(comm: Any, shared_tmp_path: Path) -> None:
    for step in (9, 20):
        folder = checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm, keep=9)
        on_rank_0(comm, lambda folder=folder: rewritten(folder, serial=0))
    assert checkpoint.newest(shared_tmp_path, comm) == shared_tmp_path / "step-000020"
    with warned(comm, "step-000003 has an earlier step than step-000020"):
        checkpoint.save(shared_tmp_path, 3, tensors(), VALUES, comm, keep=9)
    assert checkpoint.newest(shared_tmp_path, comm) == shared_tmp_path / "step-000003"


@pytest.mark.fault(70, 71)
def test_a_manifest_cannot_reach_files_elsewhere_nor_be_of_the_future(comm: Any, shared_tmp_path: Path) -> None:
    folder = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    on_rank_0(comm, lambda: rewritten(folder, files={"../../etc/passwd": {"bytes": 1, "sha256": "0" * 64}}))
    assert "refers to the file '../../etc/passwd'" in refused(comm, lambda: checkpoint.load(folder, comm))
    on_rank_0(comm, lambda: rewritten(folder, format=99))
    assert "has format 99, this version reads up to 1" in refused(comm, lambda: checkpoint.load(folder, comm))
