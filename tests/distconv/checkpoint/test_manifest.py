"""Manifests say which step is the newest, and reach no files elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distconv import checkpoint
from tests.distconv.checkpoint.damage import VALUES, on_rank_0, refused, rewritten, tensors

pytestmark = pytest.mark.ranks(1, 2, 4)


@pytest.mark.fault(75)
def test_the_newest_is_chosen_by_its_step_not_by_its_time(comm: Any, shared_tmp_path: Path) -> None:
    assert checkpoint.newest(shared_tmp_path / "nothing", comm) is None
    for step in (9, 1000000, 20):
        checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm, keep=9)
    newest = checkpoint.newest(shared_tmp_path, comm)
    assert newest == shared_tmp_path / "step-1000000"


@pytest.mark.fault(70, 71)
def test_a_manifest_cannot_reach_files_elsewhere_nor_be_of_the_future(comm: Any, shared_tmp_path: Path) -> None:
    folder = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    on_rank_0(comm, lambda: rewritten(folder, files={"../../etc/passwd": {"bytes": 1, "sha256": ""}}))
    assert "refers to the file '../../etc/passwd'" in refused(comm, lambda: checkpoint.load(folder, comm))
    on_rank_0(comm, lambda: rewritten(folder, format=99))
    assert "has format 99, this version reads up to 1" in refused(comm, lambda: checkpoint.load(folder, comm))
