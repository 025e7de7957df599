"""The run of a training job: its folder, when it evaluates and saves, its lines of metrics, and how it is stopped."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distconv import cli
from distconv.errors import DataError
from distconv.jobs.training.picture import ResultFigure
from distconv.jobs.training.report import Metrics
from distconv.jobs.training.run import CHECKPOINTS, prepare_run, take_steps
from distconv.process.stop_requests import EXIT_CODE
from tests.jobs.commands.test_train_classify import command, lines_of
from tests.jobs.images.image_files import written
from tests.jobs.training.stand_in import StandIn

ROOT = Path(__file__).parents[3]

on_ranks = pytest.mark.ranks(1, 2)


def options(
    folder: Path, *, resume: bool = False, overwrite: bool = False, every: int = 0, check: int | None = None
) -> argparse.Namespace:
    return argparse.Namespace(
        out=folder / "out",
        resume=resume,
        overwrite=overwrite,
        checkpoint_every=every,
        check_replicas_every=check,
        trace=None,
        capture="off",
    )


def take_all(given: argparse.Namespace, trainer: Any, *more: Any) -> Metrics:
    """Prepare a run and take its steps."""
    prepare_run(given, trainer)
    with Metrics(given.out, trainer) as metrics:
        take_steps(given, trainer, metrics, *more)
    trainer.comm.Barrier()
    return metrics


def signal_at(trainer: Any, step: int, rank: int) -> None:
    """A rank gets a signal in the step after ``step``."""

    def signalled(*batch: object) -> None:
        if trainer.step_count == step and trainer.comm.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        StandIn.step(trainer, *batch)

    trainer.step = signalled


@on_ranks
@pytest.mark.parametrize("left", ["checkpoints/step-000004", "metrics.jsonl", "summary.json"])
def test_a_new_run_erases_an_earlier_one_only_when_asked(comm: Any, shared_tmp_path: Path, left: str) -> None:
    trainer: Any = StandIn(comm)
    out = options(shared_tmp_path).out
    if comm.rank == 0:
        (out / left).parent.mkdir(parents=True)
        (out / left).write_text("of an earlier run")
        (out / "mesh.h5").write_text("data")
        if left != "metrics.jsonl":
            (out / "metrics.jsonl").touch()  # of a run that took no step: nothing to lose
    comm.Barrier()
    with pytest.raises(
        DataError, match=rf"out: holds an earlier run \({left.split('/')[0]}\). Resume it with --resume"
    ):
        prepare_run(options(shared_tmp_path), trainer)
    assert (out / left).read_text() == "of an earlier run"
    comm.Barrier()
    assert not prepare_run(options(shared_tmp_path, overwrite=True), trainer)
    comm.Barrier()
    assert not (out / left).exists()
    assert (out / "mesh.h5").read_text() == "data"
    assert not prepare_run(options(shared_tmp_path), trainer)


@pytest.mark.fault(78)
@on_ranks
def test_nothing_in_the_folder_of_a_run_leads_elsewhere(comm: Any, shared_tmp_path: Path) -> None:
    trainer: Any = StandIn(comm)
    out, mine = options(shared_tmp_path).out, shared_tmp_path / "mine"
    if comm.rank == 0:
        mine.mkdir()
        (mine / "notes").write_text("mine")
        (out / CHECKPOINTS).mkdir(parents=True)
        (out / CHECKPOINTS / "step-000001").symlink_to(mine)
        for name in ("metrics.jsonl", "summary.json"):
            (out / name).symlink_to(mine / "notes")
    comm.Barrier()
    with pytest.raises(DataError, match=r"holds an earlier run \(checkpoints, metrics.jsonl, summary.json\)"):
        prepare_run(options(shared_tmp_path), trainer)
    assert not prepare_run(options(shared_tmp_path, overwrite=True), trainer)
    with Metrics(out, trainer) as metrics:
        metrics.write(step=1, loss=0.5)
    comm.Barrier()
    assert (out / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n'
    assert not (out / CHECKPOINTS / "step-000001").exists()
    comm.Barrier()
    if comm.rank == 0:
        (out / CHECKPOINTS / ".lock").unlink()
        (out / CHECKPOINTS).rmdir()
        (out / CHECKPOINTS).symlink_to(mine)
    comm.Barrier()
    with pytest.raises(DataError, match="it is a symbolic link, which is not followed"):
        prepare_run(options(shared_tmp_path, overwrite=True), trainer)
    assert [path.name for path in mine.iterdir()] == ["notes"]
    assert (mine / "notes").read_text() == "mine"


def _steps(data: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines_of(data) if "evaluation" not in line]


@on_ranks
def test_a_run_that_is_resumed_needs_a_checkpoint(comm: Any, shared_tmp_path: Path) -> None:
    trainer: Any = StandIn(comm)
    with pytest.raises(DataError, match=r"--resume: no finished checkpoint in .* Start without --resume"):
        prepare_run(options(shared_tmp_path, resume=True), trainer)
    trainer.checkpoint = 2
    assert prepare_run(options(shared_tmp_path, resume=True), trainer)
    assert trainer.step_count == 2


@on_ranks
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize(("every", "saves"), [(0, []), (2, [2, 4, 6]), (4, [4, 6])])
def test_it_evaluates_behind_each_epoch_but_the_last_and_saves_when_asked(
    comm: Any, shared_tmp_path: Path, every: int, saves: list[int], delay: int
) -> None:
    trainer: Any = StandIn(comm, delay=delay)
    given = options(shared_tmp_path, every=every)
    metrics = take_all(given, trainer, lambda: trainer.asked.append(f"evaluate {trainer.step_count}"))
    begun = [word for word in trainer.asked if not word.startswith("saved")]
    assert sorted(begun) == sorted(["evaluate 3", *(f"save {step}" for step in saves)])
    lines = list(metrics.lines())
    assert [(line["step"], line["epoch"], line["loss"]) for line in lines] == [
        (step, (step - 1) // 3, 1.0 / step) for step in range(1, 7)
    ]
    assert all(line["lr"] == 0.5 for line in lines)


def test_a_line_has_the_seconds_of_its_step_and_the_samples_of_its_batch_in_each(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr("distconv.jobs.training.run.time", SimpleNamespace(perf_counter=lambda: 0.25 * next(ticks)))
    trainer: Any = StandIn(comm)
    metrics = take_all(options(shared_tmp_path), trainer)
    # A look at the clock before each step of two samples, and one behind it.
    assert [(line["seconds"], line["samples_per_s"]) for line in metrics.lines()] == [(0.25, 8.0)] * 6


@on_ranks
@pytest.mark.parametrize("delay", [0, 2])
def test_a_checkpoint_is_committed_in_the_step_in_which_all_ranks_have_written_it(
    comm: Any, shared_tmp_path: Path, delay: int
) -> None:
    trainer: Any = StandIn(comm, epochs=8, delay=delay)
    take_all(options(shared_tmp_path, every=10), trainer)
    # The last of the ranks takes 2 steps, and one for each rank before it; an answer is known ``delay`` steps later.
    takes = 1 + comm.size + delay
    saved = ["save 10", f"saved 10 at {10 + takes}", "save 20", f"saved 20 at {min(20 + takes, 24)}"]
    assert trainer.asked == [*saved, "save 24", "saved 24 at 24"]


@on_ranks
def test_a_run_that_ends_on_all_ranks_commits_its_checkpoint_first(comm: Any, shared_tmp_path: Path) -> None:
    trainer: Any = StandIn(comm)

    def failing(*batch: object) -> None:
        if trainer.step_count == 3:
            raise DataError("the loss is nan")
        StandIn.step(trainer, *batch)

    trainer.step = failing
    with pytest.raises(DataError, match="the loss is nan"):
        take_all(options(shared_tmp_path, every=3), trainer)
    assert trainer.asked == ["save 3", "saved 3 at 3"]


@pytest.mark.fault(42)
@on_ranks
def test_replicas_are_compared_as_often_as_asked(comm: Any, shared_tmp_path: Path) -> None:
    trainer: Any = StandIn(comm)
    take_all(options(shared_tmp_path, check=2), trainer)
    assert trainer.asked == ["check 2", "check 4", "check 6"]


@pytest.mark.fault(61)
@on_ranks
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)
    data = written(comm, shared_tmp_path)
    words = command(comm, data, "--epochs", "2", "--checkpoint-every", "2")
    assert cli.main(words) == 0
    comm.Barrier()
    undisturbed = _steps(data)
    comm.Barrier()
    if comm.rank == 0:
        (newest,) = (data / "out" / CHECKPOINTS / "step-000006").glob("*.h5")
        newest.write_bytes(newest.read_bytes()[:-1])
    comm.Barrier()
    capsys.readouterr()
    assert cli.main([*words, "--resume"]) == 2
    said = "delete it to resume from an earlier one, or pass fallback=True (jobs: --resume whole"
    assert (said in capsys.readouterr().err) == (comm.rank == 0)
    assert cli.main([*words, "--resume", "whole"]) == 0
    assert ("passed over: checkpoint " in capsys.readouterr().out) == (comm.rank == 0)
    comm.Barrier()
    assert _steps(data) == undisturbed


# --- Runs that a signal stops ---


@pytest.mark.fault(50)
@on_ranks
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("every", [0, 2])
def test_a_stopped_run_has_a_checkpoint_and_all_its_losses(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int, delay: int
) -> None:
    trainer: Any = StandIn(comm, delay=delay)
    given = options(shared_tmp_path, every=every)
    prepare_run(given, trainer)
    last = 3 + delay
    signal_at(trainer, 2, comm.size - 1)
    with pytest.raises(SystemExit) as end, Metrics(given.out, trainer) as metrics:
        take_steps(given, trainer, metrics)
    comm.Barrier()
    assert end.value.code == EXIT_CODE == 143
    assert trainer.asked[-3:] == [f"save {last}", f"saved {last} at {last}", "close"]
    assert [line["loss"] for line in metrics.lines()] == [1.0 / step for step in range(1, last + 1)]
    said = f"stopped by a signal after step {last} of 6. Continue with --resume."
    assert (said in capsys.readouterr().out) == (comm.rank == 0)


@pytest.mark.fault(50)
@on_ranks
def test_a_signal_in_the_last_step_stops_nothing(comm: Any, shared_tmp_path: Path) -> None:
    trainer: Any = StandIn(comm)
    signal_at(trainer, 5, comm.rank)
    take_all(options(shared_tmp_path), trainer)
    assert (trainer.step_count, trainer.asked) == (6, [])


@pytest.mark.parametrize(
    ("words", "restarts", "code", "resumes"),
    [
        (f"{script} data {model} OUT", restarts, code, resumes)
        for script, model in (("train_classify", "model"), ("train_mesh", ""))
        for restarts, code, resumes in ((0, 143, False), (1, 143, False), (1, 0, True), (1, 2, True))
    ]
    + [("train_own train.py --epochs 3", 0, code, False) for code in (143, 0, 2)],
)
def test_a_job_that_is_stopped_goes_back_into_the_queue_and_resumes(
    tmp_path: Path, words: str, restarts: int, code: int, resumes: bool
) -> None:
    _slurm(tmp_path)
    script, *arguments = words.replace("OUT", str(tmp_path / "out")).split()
    if resumes:
        (tmp_path / "out" / "checkpoints" / "step-000004").mkdir(parents=True)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_RESTART_COUNT": str(restarts), "SLURM_JOB_ID": "7", "CODE": str(code)}
    command = ["bash", str(ROOT / "jobs" / f"{script}.sbatch"), *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == (0 if code == 143 else code), found.stderr
    assert ("--resume" in found.stdout) == resumes
    # A start that failed before its first checkpoint left a run that is not worth keeping.
    assert ("--overwrite" in found.stdout) == (restarts == 1 and not resumes)
    assert ("scontrol requeue 7" in found.stdout) == (code == 143)
    assert script != "train_own" or "srun distconv run train.py --epochs 3" in found.stdout


def _slurm(folder: Path) -> None:
    for name, status in (("srun", "$CODE"), ("scontrol", "0")):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\nexit {status}\n')
        (folder / name).chmod(0o755)
