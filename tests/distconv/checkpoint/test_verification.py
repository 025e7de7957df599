"""A checkpoint is whole as long as its files are what they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mpi4py import MPI

from distconv import checkpoint
from distconv.checkpoint import verification
from distconv.checkpoint.manifest import MANIFEST
from distconv.checkpoint.verification import is_intact
from distconv.errors import CheckpointError
from tests.distconv.checkpoint.damage import VALUES, only_file, tensors


def saved(folder: Path) -> Path:
    return checkpoint.save(folder, 1, tensors(), VALUES, MPI.COMM_SELF)


@pytest.mark.fault(77)
def test_any_change_is_seen(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert is_intact(folder)
    path = only_file(folder)
    content = path.read_bytes()
    for other in (content[:-1], content + b"x", content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(other)
        assert not is_intact(folder)
        path.write_bytes(content)
        assert is_intact(folder)
    (folder / MANIFEST).write_bytes(b"")
    assert not is_intact(folder)


def test_what_has_not_changed_since_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path)
    os.utime(only_file(folder), (0, 0))
    assert is_intact(folder)
    monkeypatch.setattr(verification, "sha256_of", lambda _: "")
    assert is_intact(folder)
    os.utime(only_file(folder), (1, 1))
    assert not is_intact(folder)


@pytest.mark.fault(71, 80)
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["state", "manifest"])
def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path: Path, kind: str, name: str) -> None:
    folder = saved(tmp_path)
    path = only_file(folder) if name == "state" else folder / MANIFEST
    path.rename(tmp_path / "beside")
    if kind == "link":
        path.symlink_to(tmp_path / "beside")
    else:
        os.mkfifo(path)
    reason = "it is a symbolic link, which is not followed" if kind == "link" else "is not a regular file"
    with pytest.raises(CheckpointError, match=f"step-000001 is damaged: .*{reason}"):
        checkpoint.load(folder, MPI.COMM_SELF)
    assert not is_intact(folder)


@pytest.mark.fault(80)
def test_a_manifest_larger_than_any_is_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    os.truncate(folder / MANIFEST, 3 << 30)
    with pytest.raises(CheckpointError, match=f"is damaged: {MANIFEST} has {3 << 30} bytes, more than any"):
        checkpoint.load(folder, MPI.COMM_SELF)
