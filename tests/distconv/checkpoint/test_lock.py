"""A folder of checkpoints belongs to the job that writes to it, until that job's end."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distconv import checkpoint
from distconv.checkpoint.lock import LOCK
from distconv.errors import CheckpointError
from distconv.jobs.training.run import CHECKPOINTS, prepare_run
from tests.distconv.checkpoint.damage import VALUES, on_rank_0, refused, tensors
from tests.distconv.layouts import raises_everywhere
from tests.jobs.training.stand_in import StandIn
from tests.jobs.training.test_run import options

pytestmark = pytest.mark.ranks(1, 2, 4)

OTHER = """
import sys, time
from pathlib import Path
from distconv.checkpoint.lock import lock_directory
lock_directory(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@contextmanager
def another_job(comm: Any, folder: Path) -> Iterator[int]:
    """Something that has the lock of ``folder``, and is killed in the end; its process on rank 0."""
    job = None
    if comm.rank == 0:
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "PRTE"))}
        job = subprocess.Popen([sys.executable, "-c", OTHER, str(folder)], env=alone, stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        assert job.stdout.readline() == "locked\n"
    pid = comm.bcast(job.pid if job else 0)
    try:
        yield pid
    finally:
        if job is not None:
            job.kill()
            job.wait()
            job.stdout.close()  # type: ignore[union-attr]
        comm.Barrier()


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.fault(72)
def test_the_second_job_with_one_folder_is_refused_until_the_first_is_gone(comm: Any, shared_tmp_path: Path) -> None:
    with another_job(comm, shared_tmp_path) as pid:
        text = refused(comm, lambda: checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm))
        assert f"another job writes its checkpoints to {shared_tmp_path}: process {pid} on " in text
        assert "Name another folder, or wait for its end" in text
        assert checkpoint.newest(shared_tmp_path, comm) is None
    for step in (1, 2):
        checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm)
    assert checkpoint.newest(shared_tmp_path, comm) == shared_tmp_path / "step-000002"


@pytest.mark.fault(72)
@pytest.mark.long
@pytest.mark.ranks(2)
def test_a_training_in_the_folder_of_another_is_refused_before_it_erases_anything(
    comm: Any, shared_tmp_path: Path
) -> None:
    given, trainer = options(shared_tmp_path, overwrite=True), StandIn(comm)
    trainer.checkpoint = 4
    with another_job(comm, given.out / CHECKPOINTS):
        on_rank_0(comm, lambda: (given.out / CHECKPOINTS / "step-000004").mkdir())
        text = "another job writes its checkpoints to"
        raises_everywhere(comm, CheckpointError, text, lambda: prepare_run(given, trainer))  # type: ignore[arg-type]
        assert (given.out / CHECKPOINTS / "step-000004").exists()
        assert not trainer.asked


def test_a_folder_that_was_deleted_is_locked_anew(comm: Any, shared_tmp_path: Path) -> None:
    folder = shared_tmp_path / "run"
    checkpoint.save(folder, 1, tensors(), VALUES, comm)
    on_rank_0(comm, lambda: shutil.rmtree(folder))
    checkpoint.save(folder, 1, tensors(), VALUES, comm)
    if comm.rank == 0:
        with (folder / LOCK).open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_system_without_locks_keeps_nobody_out(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    assert checkpoint.newest(shared_tmp_path, comm) == shared_tmp_path / "step-000001"


@pytest.mark.fault(78)
@pytest.mark.parametrize("kind", ["link", "pipe", "second name"])
def test_what_another_file_is_reached_by_is_no_lock(comm: Any, shared_tmp_path: Path, kind: str) -> None:
    place, mine = shared_tmp_path / LOCK, shared_tmp_path / "mine"

    def lay() -> None:
        mine.write_text("mine")
        if kind == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to(mine) if kind == "link" else place.hardlink_to(mine)

    on_rank_0(comm, lay)
    text = refused(comm, lambda: checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm))
    assert f"{place} is a " in text
    assert "not a lock file of distconv. Delete it" in text
    assert mine.read_text() == "mine"
