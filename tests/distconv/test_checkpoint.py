"""Checkpoints hold what was saved bit for bit, count only when finished, and are refused when anything is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distconv import checkpoint
from distconv.errors import CheckpointError
from tests.distconv.data.sample_files import common

pytestmark = pytest.mark.ranks(1, 2, 4)

VALUES = {"epoch": 3, "lr": 0.1 + 0.2, "nested": {"name": "mesh", "list": [1, 2]}}


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return {
        "model/weight": torch.randn(3, 4, dtype=torch.float64, generator=random),
        "model/half": torch.randn(5, generator=random).to(torch.bfloat16),
        "model/count": torch.tensor(7),
        "model/empty": torch.empty(0, 2),
        "random/torch": torch.arange(9, dtype=torch.uint8),
    }


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.h5")
    return path


def refused(comm: Any, act: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        act()
    return common(comm, caught.value)


def on_rank_0(comm: Any, act: Callable[[], Any]) -> None:
    if comm.rank == 0:
        act()
    comm.Barrier()


@pytest.mark.cpu
def test_what_is_loaded_equals_what_was_saved_bit_for_bit(comm: Any, shared_tmp_path: Path) -> None:
    folder = checkpoint.save(shared_tmp_path, 12, tensors(), VALUES, comm)
    assert folder.name == "step-000012"
    found = checkpoint.load(folder, comm)
    assert found.step == 12
    assert found.values == VALUES
    assert list(found.tensors) == list(tensors())
    for name, tensor in tensors().items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


@pytest.mark.fault(75)
def test_the_newest_is_chosen_by_its_step_not_by_its_time(comm: Any, shared_tmp_path: Path) -> None:
    assert checkpoint.newest(shared_tmp_path / "nothing", comm) is None
    for step in (9, 1000000, 20):
        checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm, keep=9)
    newest = checkpoint.newest(shared_tmp_path, comm)
    assert newest == shared_tmp_path / "step-1000000"


@pytest.mark.fault(74)
def test_old_ones_are_deleted_once_the_new_one_is_there(comm: Any, shared_tmp_path: Path) -> None:
    for step in range(5):
        checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm, keep=2)
    comm.Barrier()
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["step-000003", "step-000004"]


@pytest.mark.fault(57)
def test_a_step_that_was_never_finished_does_not_count(comm: Any, shared_tmp_path: Path) -> None:
    first = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    second = checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm)
    on_rank_0(comm, lambda: (second / checkpoint.MANIFEST).unlink())
    assert checkpoint.newest(shared_tmp_path, comm) == first
    assert "is incomplete: it has no manifest.json" in refused(comm, lambda: checkpoint.load(second, comm))
    # What an interrupted save left does not stand in the way of the next one.
    on_rank_0(comm, lambda: (second / "state-000000000000.h5.partial").write_bytes(b"half"))
    checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm)
    assert checkpoint.load(second, comm).step == 2
    assert len(list(second.iterdir())) == 2


def test_saving_a_step_again_replaces_it(comm: Any, shared_tmp_path: Path) -> None:
    checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm)
    folder = checkpoint.save(shared_tmp_path, 2, {"other": torch.ones(2)}, {}, comm)
    assert list(checkpoint.load(folder, comm).tensors) == ["other"]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.fault(61, 62)
@pytest.mark.parametrize("target", ["state", "manifest"])
def test_every_flipped_bit_and_every_cut_is_found(comm: Any, shared_tmp_path: Path, target: str) -> None:
    folder = checkpoint.save(shared_tmp_path, 3, tensors(), VALUES, comm)
    path = only_file(folder) if target == "state" else folder / checkpoint.MANIFEST
    content = path.read_bytes()
    comm.Barrier()
    for place in range(0, len(content), max(1, len(content) // 20)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        for damaged in (bytes(flipped), content[:place]):
            on_rank_0(comm, lambda damaged=damaged: path.write_bytes(damaged))
            text = refused(comm, lambda: checkpoint.load(folder, comm))
            assert "is damaged" in text
            assert str(folder) in text
    on_rank_0(comm, lambda: path.write_bytes(content))
    assert checkpoint.load(folder, comm).step == 3


@pytest.mark.fault(63)
def test_files_of_another_step_and_missing_files_are_found(comm: Any, shared_tmp_path: Path) -> None:
    first = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    second = checkpoint.save(shared_tmp_path, 2, {"x": torch.ones(3)}, {}, comm)
    manifest = (first / checkpoint.MANIFEST).read_bytes()
    comm.Barrier()
    on_rank_0(comm, lambda: (second / checkpoint.MANIFEST).write_bytes(manifest))
    assert "holds step 1: its files come from elsewhere" in refused(comm, lambda: checkpoint.load(second, comm))
    on_rank_0(comm, lambda: only_file(first).unlink())
    assert "is incomplete: [Errno 2]" in refused(comm, lambda: checkpoint.load(first, comm))


def rewritten(folder: Path, **changed: Any) -> None:
    """Change the manifest and give it a right checksum, as somebody who means harm would."""
    path = folder / checkpoint.MANIFEST
    manifest = json.loads(path.read_text()) | changed
    manifest.pop("sha256")
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


@pytest.mark.fault(70, 71)
def test_a_manifest_cannot_reach_files_elsewhere_nor_be_of_the_future(comm: Any, shared_tmp_path: Path) -> None:
    folder = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    on_rank_0(comm, lambda: rewritten(folder, files={"../../etc/passwd": {"bytes": 1, "sha256": ""}}))
    assert "refers to the file '../../etc/passwd'" in refused(comm, lambda: checkpoint.load(folder, comm))
    on_rank_0(comm, lambda: rewritten(folder, format=99))
    assert "has format 99, this version reads up to 1" in refused(comm, lambda: checkpoint.load(folder, comm))


@pytest.mark.fault(65)
def test_pieces_must_cover_their_tensor(comm: Any, shared_tmp_path: Path) -> None:
    folder = checkpoint.save(shared_tmp_path, 1, {"x": torch.ones(3)}, {}, comm)
    name = only_file(folder).name
    entry = {"x": {"dtype": "torch.float32", "shape": [4], "pieces": [{"file": name, "box": [[0, 3]]}]}}
    comm.Barrier()
    on_rank_0(comm, lambda: rewritten(folder, tensors=entry))
    assert "the pieces of 'x' cover 3 of 4 elements" in refused(comm, lambda: checkpoint.load(folder, comm))


@pytest.mark.fault(58)
def test_a_full_disk_leaves_the_earlier_checkpoint_intact(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.os, "write", full)
        text = refused(comm, lambda: checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm))
    assert "could not be written: [Errno 28] No space left on device" in text
    assert not list(shared_tmp_path.rglob("*.partial"))
    assert checkpoint.newest(shared_tmp_path, comm) == first
    assert checkpoint.load(first, comm).step == 1
    checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm)


@pytest.mark.fault(60)
def test_a_folder_that_is_a_file_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    on_rank_0(comm, lambda: (shared_tmp_path / "file").touch())
    text = refused(comm, lambda: checkpoint.save(shared_tmp_path / "file", 2, tensors(), VALUES, comm))
    assert "could not be written: [Errno 20] Not a directory" in text


def test_values_that_json_has_no_word_for_are_refused(comm: Any, shared_tmp_path: Path) -> None:
    assert "JSON" in refused(comm, lambda: checkpoint.save(shared_tmp_path, 2, {}, {"loss": float("nan")}, comm))
