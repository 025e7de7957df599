"""Checkpoints on disks that fail, in jobs that are killed, and from other hands and times."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distconv import checkpoint
from distconv.checkpoint import reading
from distconv.errors import DataError
from distconv.jobs.training.run import prepare_run
from tests.distconv.checkpoint.damage import VALUES, on_rank_0, refused, tensors
from tests.distconv.layouts import raises_everywhere
from tests.jobs.training.stand_in import StandIn
from tests.jobs.training.test_run import options

on_ranks = pytest.mark.ranks(2, 4)

KILLED = """
import os, random, signal, sys, threading, time
import torch
from mpi4py import MPI
from distconv import checkpoint
from distconv.checkpoint import reading

folder, comm, lines = sys.argv[1], MPI.COMM_SELF, 0
found = {"complete": 0, "lost": 0, "points": 0}

def tensors(step):
    return {"a": torch.full((200, 100), float(step)), "b": torch.arange(step, step + 9)}

def save(step):
    state = tensors(step)
    saving = checkpoint.AsyncSave(folder, step, state, {"of": step}, comm)
    for tensor in state.values():  # as the next steps do
        tensor.zero_()
    time.sleep(0.003)
    saving.finish()

def traced(last):
    def trace(frame, event, argument):
        global lines
        if not frame.f_code.co_filename.endswith(("checkpoint/writing.py", "checkpoint/lock.py", "whole_files.py")):
            return None
        lines += event == "line"
        if lines == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    threading.settrace(trace)

def attempt(step, last=0, delay=None):
    child = os.fork()
    if not child:
        if delay is None:
            traced(last)
        save(step)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

def complete(step):
    newest = checkpoint.load(checkpoint.newest(folder, comm), comm)
    assert newest.step in (step - 1, step) and newest.values == {"of": newest.step}, (newest.step, step)
    for name, tensor in tensors(newest.step).items():
        assert torch.equal(newest.tensors[name], tensor), name
    found["complete" if newest.step == step else "lost"] += 1
    return newest.step

save(0)
save(1)
traced(-1)
save(2)
sys.settrace(None)
threading.settrace(None)
points, step = range(1, lines + 1), 2
found["points"] = len(points)
lines = 0
for last in points:
    attempt(step + 1, last=last)
    step = complete(step + 1)
began = time.monotonic()
save(step + 1)
step += 1
takes = time.monotonic() - began
random.seed(0)
for _ in range(100):
    attempt(step + 1, delay=random.uniform(0.0, 2 * takes))
    step = complete(step + 1)
print(found)
"""


@pytest.mark.slow
@pytest.mark.fault(56, 57)
@pytest.mark.time_limit(330)
def test_a_save_that_is_killed_anywhere_leaves_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    """At every line of what changes the disk, and at 100 random times."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.replace("'", '"'))
    assert found["points"] >= 12
    assert found["complete"] + found["lost"] == found["points"] + 100
    assert min(found.values()) > 0


@pytest.mark.fault(58, 59)
@on_ranks
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_an_error_of_the_disk_reaches_all_and_harms_nothing(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    first = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        text = refused(comm, lambda: checkpoint.save(shared_tmp_path, 2, tensors(), VALUES, comm))
        comm.Barrier()
    assert f"[Errno {number}] {os.strerror(number)}" in text
    assert not list(shared_tmp_path.rglob("*.partial"))
    intact(comm, shared_tmp_path, first)


def intact(comm: Any, folder: Path, first: Path) -> None:
    """The checkpoint of step 1 is whole and the newest, and step 2 can be saved."""
    assert checkpoint.newest(folder, comm) == first
    assert checkpoint.load(first, comm).step == 1
    assert checkpoint.load(checkpoint.save(folder, 2, tensors(), VALUES, comm), comm).step == 2
    assert not list(folder.rglob("*.partial"))


@pytest.mark.fault(60)
@on_ranks
@pytest.mark.parametrize("who", ["one rank", "all ranks"])
def test_a_folder_that_cannot_be_made_is_refused_before_any_step(
    comm: Any, shared_tmp_path: Path, tmp_path: Path, who: str
) -> None:
    place = tmp_path if who == "one rank" else shared_tmp_path
    if who == "all ranks" or comm.rank == comm.size - 1:
        (place / "out").touch()
    comm.Barrier()
    given, trainer = options(place), StandIn(comm)
    raises_everywhere(comm, DataError, r"\[Errno 17\] File exists", lambda: prepare_run(given, trainer))  # type: ignore[arg-type]
    assert trainer.step_count == 0


OLD = Path(__file__).parent / "checkpoint-format-1"
"""Written by ``checkpoint.save(OLD, 3, OLD_TENSORS, VALUES, comm)`` when 1 was the newest format."""

OLD_TENSORS = {
    "model/weight": torch.arange(6, dtype=torch.float64).reshape(2, 3) / 8,
    "model/half": torch.tensor([0.5, -1.5]).bfloat16(),
    "model/count": torch.tensor(7),
}


@pytest.mark.fault(70)
@on_ranks
def test_a_checkpoint_of_the_first_format_is_read(comm: Any, shared_tmp_path: Path) -> None:
    on_rank_0(comm, lambda: shutil.copytree(OLD, shared_tmp_path / "old"))
    newest = checkpoint.newest(shared_tmp_path / "old", comm)
    assert newest is not None
    found = checkpoint.load(newest, comm)
    assert (found.step, found.values, list(found.tensors)) == (3, VALUES, list(OLD_TENSORS))
    for name, tensor in OLD_TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


@pytest.mark.fault(73)
@on_ranks
def test_a_checkpoint_that_one_rank_does_not_see_is_refused_on_all(
    comm: Any, shared_tmp_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(shared_tmp_path / "saved", 1, tensors(), VALUES, comm)
    # A file system that lags behind on another node.
    monkeypatch.chdir(tmp_path / ".." if comm.rank == comm.size - 1 else shared_tmp_path)
    monkeypatch.setattr(reading, "LAG_S", 0.5)
    newest = checkpoint.newest("saved", comm)
    assert newest == Path("saved/step-000001")
    began = time.monotonic()
    assert f"(on rank {comm.size - 1})" in refused(comm, lambda: checkpoint.load(newest, comm))
    assert time.monotonic() - began > 0.5
