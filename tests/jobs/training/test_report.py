"""Files of a run: lines of metrics that a resumed run continues, and notes for the user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from distconv.jobs.training import report
from distconv.jobs.training.report import Metrics, announcement, conclude, draw_figure, format_times, peak_memory_bytes
from distconv.jobs.training.settings import TrainingSettings
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


def test_the_evaluation_at_the_last_step_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(LINES.splitlines()[1] + "\n" + LINES.splitlines()[2] + "\n")
    trainer = StandIn(MPI.COMM_SELF, epochs=1, steps_per_epoch=2)
    trainer.step_count = 2
    with Metrics(tmp_path, trainer) as metrics:  # type: ignore[arg-type]
        assert list(metrics.lines()) == [{"step": 2, "loss": 0.25}]


def test_the_tracker_has_the_lines_that_are_kept_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text(LINES)
    trainer, opened = StandIn(MPI.COMM_SELF), []
    written: list[Any] = []
    tracker = SimpleNamespace(write=written.append, close=lambda: written.append("closed"))
    monkeypatch.setattr(report, "open_tracker", lambda *given: opened.append(given) or tracker)
    trainer.step_count = 1
    with Metrics(tmp_path, trainer, "mlflow") as metrics:  # type: ignore[arg-type]
        metrics.write(step=2, loss=0.75)
    assert opened == [("mlflow", tmp_path, [{"step": 1, "loss": 0.5}])]
    assert written == [{"step": 2, "loss": 0.75}, "closed"]


def test_a_picture_that_cannot_be_drawn_is_a_note() -> None:
    def missing() -> None:
        raise ImportError("No module named 'matplotlib'")

    assert draw_figure(Path("x.png"), lambda: None) == "figure: x.png"
    assert draw_figure(Path("x.png"), missing) == "no figure: matplotlib is not installed. Run pip install matplotlib."


def test_times_are_a_line() -> None:
    assert format_times(1.26, 3.0) == "training took 1.3 s, the job 3.0 s"


@pytest.mark.ranks(1, 2)
def test_a_summary_has_the_last_loss_and_the_peak_of_each_rank(comm: Any, shared_tmp_path: Path, capsys: Any) -> None:
    trainer: Any = StandIn(comm)
    trainer.settings, trainer.placement = TrainingSettings(model="x"), {"grid": "h=2"}
    with Metrics(shared_tmp_path, trainer) as metrics:
        for step, loss in ((1, 0.5), (2, 0.25)):
            metrics.write(step=step, loss=loss)
        metrics.write(step=2, evaluation="test", loss=4.0)
        trainer.step_count = 2
        conclude(trainer, metrics, {"mine": 7}, lambda: print("shown"))
    comm.Barrier()
    found = json.loads((shared_tmp_path / "summary.json").read_text())
    assert (found["final_loss"], found["steps"], found["ranks"], found["mine"]) == (0.25, 2, comm.size, 7)
    assert (found["settings"]["model"], found["grid"]) == ("x", "h=2")
    peaks = ", ".join(f"{peak / 2**20:.0f}" for peak in found["peak_memory_bytes"])
    assert len(found["peak_memory_bytes"]) == comm.size
    said = f"shown\npeak memory per rank: {peaks} MiB\n"
    assert capsys.readouterr().out == ("" if comm.rank else said)


def test_peak_memory_is_in_bytes() -> None:
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert kilobytes is not None
    assert peak_memory_bytes() == pytest.approx(1024 * int(kilobytes[1]), rel=0.1)


def test_an_announcement_says_what_is_trained_and_from_where() -> None:
    trainer: Any = SimpleNamespace(
        settings=TrainingSettings(model="x", batch=4, dtype="float64"), parameter_count=7,
        loader=SimpleNamespace(samples=10), step_count=2, steps=6, distribution="grid h=2",
        comm=SimpleNamespace(size=2),
    )  # fmt: skip
    said = "x (7 parameters, float64) on 10 samples of 3 x 3, batch 4, {}6 steps, grid h=2 over 2 ranks"
    assert announcement(trainer, "3 x 3", resumed=False) == said.format("")
    assert announcement(trainer, "3 x 3", resumed=True) == said.format("from step 2 on, ")
