"""Checkpoints hold what was saved bit for bit, and count only when finished."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import distconv as dc
from distconv import checkpoint
from distconv.checkpoint import writing
from distconv.checkpoint.manifest import MANIFEST, read
from distconv.communication.transport import count_traffic
from distconv.distribution import Distribution
from tests.distconv.checkpoint.damage import VALUES, on_rank_0, only_file, refused, tensors, warned
from tests.distconv.layouts import grid_over, normal

pytestmark = pytest.mark.ranks(1, 2, 4)


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


@pytest.mark.fault(74)
@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_so_many_stay_as_are_to_be_kept_and_always_the_new_one(comm: Any, shared_tmp_path: Path, keep: int) -> None:
    for step in range(5):
        folder = checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm, keep=keep)
    comm.Barrier()
    names = [f"step-{step:06d}" for step in range(5)]
    assert sorted(path.name for path in shared_tmp_path.glob("step-*")) == names[-max(keep, 1) :]
    assert checkpoint.load(folder, comm).step == 4


@pytest.mark.fault(57)
def test_a_step_that_was_never_finished_does_not_count(comm: Any, shared_tmp_path: Path) -> None:
    first = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    second = checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm)
    on_rank_0(comm, lambda: (second / MANIFEST).unlink())
    assert checkpoint.newest(shared_tmp_path, comm) == first
    assert "is incomplete: it has no manifest.json" in refused(comm, lambda: checkpoint.load(second, comm))
    # What an interrupted save left does not stand in the way of the next one.
    on_rank_0(comm, lambda: (second / "state-0.0123abcd.partial").write_bytes(b"half"))
    checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm)
    assert checkpoint.load(second, comm).step == 2
    assert len(list(second.iterdir())) == 2


def test_saving_a_step_again_replaces_it(comm: Any, shared_tmp_path: Path) -> None:
    checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm)
    folder = checkpoint.save(shared_tmp_path, 2, {"other": torch.ones(2)}, {}, comm)
    assert list(checkpoint.load(folder, comm).tensors) == ["other"]
    assert len(list(folder.iterdir())) == 2


def test_whatever_stops_the_writing_nothing_is_committed(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)

    def odd(*_: object) -> int:
        raise ValueError("nobody thought of this")

    with monkeypatch.context() as patched:
        patched.setattr(writing, "hdf5_image", odd)
        text = refused(comm, lambda: checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm))
    assert "could not be written: nobody thought of this" in text
    assert checkpoint.newest(shared_tmp_path, comm) == first


@pytest.mark.fault(60)
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        *(({"keep": keep}, f"keep={keep!r} is not a number of checkpoints") for keep in (-1, 2.0, None, True, "2")),
        *(({"step": step}, f"of step {step!r}. Pass a whole number from 0 on.") for step in (-1, 1.5, "7")),
        ({"folder": "file"}, "could not be written: [Errno 17] File exists"),
    ],
)
def test_arguments_that_cannot_be_are_refused(comm: Any, shared_tmp_path: Path, changed: Any, reason: str) -> None:
    on_rank_0(comm, lambda: (shared_tmp_path / "file").touch())
    named = {"folder": "new", "step": 1, "keep": 1} | changed
    folder, step = shared_tmp_path / named["folder"], named["step"]
    assert reason in refused(comm, lambda: checkpoint.save(folder, step, tensors(), VALUES, comm, keep=named["keep"]))
    assert [path.name for path in shared_tmp_path.iterdir()] == ["file"]


SLOW = """
import time, sys, torch
from mpi4py import MPI
from distconv import checkpoint
from distconv.checkpoint import writing
comm = MPI.COMM_WORLD
write = writing.AsyncSave._write
def slowly(self):
    time.sleep(2.5 if comm.rank == 1 else 0)
    write(self)
writing.AsyncSave._write = slowly
checkpoint.save(sys.argv[1], 1, {"x": torch.ones(3)}, {}, comm)
print("committed", flush=True)
"""


@pytest.mark.ranks(1)
def test_a_slow_disk_is_no_deadlock(tmp_path: Path, mpiexec: Any) -> None:
    ended = mpiexec(2, SLOW, str(tmp_path / "run"), timeout=50, env={"DISTCONV_TIMEOUT_S": "1"})
    assert ended.returncode == 0 and ended.stdout.count("committed") == 2


@pytest.mark.ranks(1, 2)
def test_a_relative_folder_stays_what_it_was_when_the_process_changes_its_folder(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shared_tmp_path)
    saving = checkpoint.AsyncSave("run", 1, {"x": torch.ones(3)}, {}, comm)
    monkeypatch.chdir("/")
    assert saving.finish() == shared_tmp_path / "run" / "step-000001"
    assert torch.equal(checkpoint.load(shared_tmp_path / "run" / "step-000001", comm).tensors["x"], torch.ones(3))


@pytest.mark.ranks(2, 4, 6)
def test_every_rank_writes_its_own_blocks_and_sends_none(comm: Any, shared_tmp_path: Path) -> None:
    whole = normal(7, 5, 3)
    half = grid_over(comm, n=2, c=comm.size // 2)
    given = {
        "split": dc.scatter(whole, Distribution(half, ("n", "c", None))),
        "in part": dc.scatter(whole, Distribution(half, ("c", None, None))),
        "nowhere": dc.scatter(whole, Distribution(half, (None, None, None))),
        "plain": whole,
    }
    with count_traffic() as traffic:
        folder = checkpoint.save(shared_tmp_path, 1, given, VALUES, comm)
    assert not traffic.sent
    assert not traffic.reduced
    listed = read(folder)["tensors"]
    assert [len(listed[name]["pieces"]) for name in given] == [comm.size, comm.size // 2, 1, 1]
    assert len(list(folder.glob("*.h5"))) == comm.size + 1  # one of what is whole everywhere
    for tensor in checkpoint.load(folder, comm).tensors.values():
        assert torch.equal(tensor, whole.cpu())


def test_what_is_being_saved_may_change_and_counts_when_it_is_finished(comm: Any, shared_tmp_path: Path) -> None:
    x, values = torch.zeros(1000), {"epoch": 1}
    first = checkpoint.save(shared_tmp_path, 1, {"x": x}, values, comm)
    saving = checkpoint.AsyncSave(shared_tmp_path, 2, {"x": x}, values, comm)
    x += 1
    values["epoch"] = 2
    assert checkpoint.newest(shared_tmp_path, comm) == first
    second = saving.finish(keep=1)
    assert checkpoint.newest(shared_tmp_path, comm) == second
    found = checkpoint.load(second, comm)
    assert torch.equal(found.tensors["x"], torch.zeros(1000, device="cpu"))
    assert found.values == {"epoch": 1}
    comm.Barrier()
    assert [path.name for path in shared_tmp_path.glob("step-*")] == ["step-000002"]


@pytest.mark.fault(58, 59)
def test_one_rank_that_cannot_write_its_blocks_fails_all(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"x": dc.scatter(normal(8, 3), Distribution(grid_over(comm, n=comm.size), ("n", None)))}
    first = checkpoint.save(shared_tmp_path, 1, given, VALUES, comm)
    if comm.rank == comm.size - 1:

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "write", broken)
    text = refused(comm, lambda: checkpoint.save(shared_tmp_path, 2, given, VALUES, comm))
    assert "could not be written: [Errno 5] Input/output error" in text
    assert checkpoint.newest(shared_tmp_path, comm) == first


@pytest.mark.ranks(2, 4)
def test_ranks_whose_blocks_are_equal_do_not_write_over_each_other(comm: Any, shared_tmp_path: Path) -> None:
    dist = Distribution(grid_over(comm, n=comm.size), ("n", None))
    for step in range(5):
        folder = checkpoint.save(shared_tmp_path, step, {"x": dc.scatter(torch.zeros(8, 3), dist)}, VALUES, comm)
    assert torch.equal(checkpoint.load(folder, comm).tensors["x"], torch.zeros(8, 3, device="cpu"))
    assert len(list(folder.glob("*.h5"))) == comm.size


def kept(comm: Any, folder: Path) -> list[int]:
    comm.Barrier()
    steps = sorted(int(path.name[5:]) for path in folder.glob("step-*"))
    comm.Barrier()
    return steps


@pytest.mark.fault(76)
def test_a_run_that_begins_anew_says_so_and_its_checkpoints_are_the_newest(comm: Any, shared_tmp_path: Path) -> None:
    for step in (1000, 2000):
        checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm)
    with warned(comm, "step-000010 has an earlier step than step-002000, .* the run has gone back"):
        folder = checkpoint.save(shared_tmp_path, 10, tensors(), VALUES, comm)
    assert checkpoint.newest(shared_tmp_path, comm) == folder
    assert kept(comm, shared_tmp_path) == [10, 2000]
    found = checkpoint.load_newest(shared_tmp_path, comm)
    assert found is not None
    assert found.step == 10
    checkpoint.save(shared_tmp_path, 20, tensors(), VALUES, comm)  # and says no more
    assert kept(comm, shared_tmp_path) == [10, 20]


@pytest.mark.fault(77)
@pytest.mark.parametrize("target", ["state", "manifest"])
def test_nothing_whole_is_deleted_while_fewer_are_kept_than_asked_for(
    comm: Any, shared_tmp_path: Path, target: str
) -> None:
    folders = [checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm, keep=3) for step in (10, 20, 30)]
    comm.Barrier()
    for folder in folders[1:]:
        path = only_file(folder) if target == "state" else folder / MANIFEST
        on_rank_0(comm, lambda path=path: path.write_bytes(path.read_bytes()[:-9] + b"otherwise"))
    found = checkpoint.load_newest(shared_tmp_path, comm, fallback=True)
    assert found is not None
    assert (found.step, len(found.skipped)) == (10, 2)
    with warned(comm, "step-000012 has an earlier step than step-000030"):
        checkpoint.save(shared_tmp_path, 12, tensors(), VALUES, comm)
    assert kept(comm, shared_tmp_path) == [10, 12, 20, 30]
    again = checkpoint.load_newest(shared_tmp_path, comm)
    assert again is not None
    assert (again.step, again.skipped) == (12, ())
    checkpoint.save(shared_tmp_path, 14, tensors(), VALUES, comm)
    # What cannot be read is not deleted: it may be of a newer version.
    assert kept(comm, shared_tmp_path) == ([12, 14] if target == "state" else [12, 14, 20, 30])


def test_what_is_not_ours_in_the_folder_of_a_step_stays_and_stops_nothing(comm: Any, shared_tmp_path: Path) -> None:
    def leave(folder: Path) -> None:
        (folder / "notes").mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")

    on_rank_0(comm, lambda: leave(shared_tmp_path / "step-000001"))
    for step in range(1, 4):
        checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm)
    assert kept(comm, shared_tmp_path) == [1, 2, 3]
    assert sorted(path.name for path in (shared_tmp_path / "step-000001").iterdir()) == ["notes", "notes.txt"]
    assert checkpoint.newest(shared_tmp_path, comm) == shared_tmp_path / "step-000003"


@pytest.mark.fault(78)
def test_no_link_is_followed_when_a_checkpoint_is_written_or_deleted(comm: Any, shared_tmp_path: Path) -> None:
    folder, mine = shared_tmp_path / "run", shared_tmp_path / "mine"

    def lay_links() -> None:
        (folder / "step-000001").mkdir(parents=True)
        mine.mkdir()
        (mine / MANIFEST).write_text("mine")
        (folder / "step-000000").symlink_to(mine)
        for name in (MANIFEST, f"{MANIFEST}.partial", "state-0.partial"):
            (folder / "step-000001" / name).symlink_to(mine / MANIFEST)

    on_rank_0(comm, lay_links)
    for step in (1, 2, 3):
        checkpoint.save(folder, step, tensors(), VALUES, comm)
    assert kept(comm, folder) == [0, 2, 3]
    text = refused(comm, lambda: checkpoint.save(folder, 0, tensors(), VALUES, comm))
    assert "step-000000 could not be written" in text
    assert "it is a symbolic link, which is not followed" in text
    assert (folder / "step-000000").is_symlink()
    assert [path.name for path in mine.iterdir()] == [MANIFEST]
    assert (mine / MANIFEST).read_text() == "mine"


def test_a_checkpoint_in_the_background_says_when_this_rank_has_written_it(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), writing.AsyncSave._write
    monkeypatch.setattr(writing.AsyncSave, "_write", lambda self: may_write.wait(30) and write(self))
    saving = checkpoint.AsyncSave(shared_tmp_path, 1, tensors(), VALUES, comm)
    assert saving.is_written is False
    may_write.set()
    saving.finish()
    assert saving.is_written is True
