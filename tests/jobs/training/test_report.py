"""What a run leaves behind: lines of metrics that a resumed run goes on with, and notes for the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distconv.jobs.training.report import Metrics, picture, times
from tests.jobs.training.stand_in import StandIn

LINES = """\
{"step": 1, "loss": 0.5}
{"step": 2, "loss": 0.25}
{"step": 2, "evaluation": "test"}
{"step": 3, "loss": 0.125}
{"step": 4, "lo"""


@pytest.mark.ranks(1, 2)
def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(comm: Any, shared_tmp_path: Path) -> None:
    if comm.rank == 0:
        (shared_tmp_path / "metrics.jsonl").write_text(LINES)
    comm.Barrier()
    trainer = StandIn(comm)
    trainer.step_count = 2
    with Metrics(shared_tmp_path, trainer) as metrics:  # type: ignore[arg-type]
        metrics.write(step=3, loss=0.75)
    comm.Barrier()
    found = list(metrics.lines())
    assert found == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.25},
        {"step": 2, "evaluation": "test"},
        {"step": 3, "loss": 0.75},
    ]
    assert metrics.losses() == [(1, 0.5), (2, 0.25), (3, 0.75)]


@pytest.mark.ranks(1, 2)
def test_a_new_run_begins_an_empty_file(comm: Any, shared_tmp_path: Path) -> None:
    if comm.rank == 0:
        (shared_tmp_path / "metrics.jsonl").write_text(LINES)
    comm.Barrier()
    with Metrics(shared_tmp_path, StandIn(comm)) as metrics:  # type: ignore[arg-type]
        assert list(metrics.lines()) == []


@pytest.mark.ranks(1)
def test_the_evaluation_at_the_last_step_is_made_anew(comm: Any, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(LINES.splitlines()[1] + "\n" + LINES.splitlines()[2] + "\n")
    trainer = StandIn(comm, epochs=1, steps_per_epoch=2)
    trainer.step_count = 2
    with Metrics(tmp_path, trainer) as metrics:  # type: ignore[arg-type]
        assert list(metrics.lines()) == [{"step": 2, "loss": 0.25}]


def test_a_picture_that_cannot_be_drawn_is_a_note() -> None:
    def missing() -> None:
        raise ImportError("No module named 'matplotlib'")

    assert picture(Path("x.png"), lambda: None) == "picture: x.png"
    assert picture(Path("x.png"), missing) == "no picture: matplotlib is not installed; pip install matplotlib"


def test_times_are_a_line() -> None:
    assert times(1.26, 3.0) == "training took 1.3 s, all of it 3.0 s"
