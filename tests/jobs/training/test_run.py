"""The run of a training job: where it starts, when it evaluates and saves, and its lines of metrics."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from distconv.errors import DataError
from distconv.jobs.training.report import Metrics
from distconv.jobs.training.run import CHECKPOINTS, prepare, take_steps
from tests.jobs.training.stand_in import StandIn

pytestmark = pytest.mark.ranks(1, 2)


def options(folder: Path, resume: bool = False, every: int = 0, check: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(out=folder / "out", resume=resume, checkpoint_every=every, check_replicas_every=check)


def test_a_new_run_puts_the_checkpoints_of_earlier_ones_aside(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(shared_tmp_path)
    trainer: Any = StandIn(comm)
    for number in range(3):
        assert not prepare(given, trainer)
        comm.Barrier()
        assert not (given.out / CHECKPOINTS).exists()
        comm.Barrier()
        if comm.rank == 0:
            (given.out / CHECKPOINTS / f"step-{number}").mkdir(parents=True)
        comm.Barrier()
    assert (given.out / "checkpoints.1" / "step-0").is_dir()
    assert (given.out / "checkpoints.2" / "step-1").is_dir()
    assert trainer.asked == []
    assert capsys.readouterr().out.count("the checkpoints of an earlier run are now in") == (2 if comm.rank == 0 else 0)


def test_a_run_that_is_resumed_needs_a_checkpoint(comm: Any, shared_tmp_path: Path) -> None:
    trainer: Any = StandIn(comm)
    with pytest.raises(DataError, match=r"--resume: there is no finished checkpoint in .*; start without --resume"):
        prepare(options(shared_tmp_path, resume=True), trainer)
    trainer.checkpoint = 2
    assert prepare(options(shared_tmp_path, resume=True), trainer)
    assert trainer.step_count == 2


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize(("every", "saves"), [(0, []), (2, [2, 4, 6]), (4, [4, 6])])
def test_it_evaluates_behind_each_epoch_but_the_last_and_saves_when_asked(
    comm: Any, shared_tmp_path: Path, every: int, saves: list[int], delay: int
) -> None:
    trainer: Any = StandIn(comm, delay=delay)
    given = options(shared_tmp_path, every=every)
    prepare(given, trainer)
    with Metrics(given.out, trainer) as metrics:
        take_steps(given, trainer, metrics, lambda: trainer.asked.append(f"evaluate {trainer.step_count}"))
    comm.Barrier()
    assert sorted(trainer.asked) == sorted(["evaluate 3", *(f"save {step}" for step in saves)])
    lines = list(metrics.lines())
    assert [(line["step"], line["epoch"], line["loss"]) for line in lines] == [
        (step, (step - 1) // 3, 1.0 / step) for step in range(1, 7)
    ]
    assert all(line["lr"] == 0.5 and line["samples_per_s"] > 0 for line in lines)


def test_replicas_are_compared_as_often_as_asked(comm: Any, shared_tmp_path: Path) -> None:
    trainer: Any = StandIn(comm)
    given = options(shared_tmp_path, check=2)
    prepare(given, trainer)
    with Metrics(given.out, trainer) as metrics:
        take_steps(given, trainer, metrics)
    assert trainer.asked == ["check 2", "check 4", "check 6"]
