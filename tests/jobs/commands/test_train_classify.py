"""``distconv train classify``: a plan, what it writes, how it resumes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import distconv as dc
from distconv import cli
from distconv.jobs.training.picture import ResultFigure
from tests.jobs.command_lines import assert_refused
from tests.jobs.images.grids import ONE_GRID, PLANS, planned
from tests.jobs.images.image_files import written
from tests.jobs.training import users_models

users_folder = users_models.users_folder


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the command that are not about their picture do not draw it."""
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)


def command(comm: Any, data: Path, *more: str) -> list[str]:
    out, grid = str(data / "out"), ONE_GRID[comm.size]
    return ["train", "classify", "--data", str(data), "--out", out, "--batch", "16", "--grid", grid, *more]


def lines_of(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "out" / "metrics.jsonl").read_text().splitlines()]


def assert_of_two_epochs(lines: list[dict[str, Any]]) -> None:
    """Lines of three steps in each epoch, evaluated after it, at the end on all groups."""
    steps = [(step, None) for step in range(1, 7)]
    expected = [*steps[:3], (3, "test"), *steps[3:], (6, "train"), (6, "test")]
    assert [(line["step"], line.get("evaluation")) for line in lines] == expected


TIMES = {"seconds": 0, "samples_per_s": 0}


def assert_resumes_with_the_same_lines(comm: Any, folder: Path, last: str, words: list[str]) -> None:
    """Without its last checkpoint, the run of ``words`` is resumed, and its lines are the same but for times."""
    complete = lines_of(folder)
    comm.Barrier()
    if comm.rank == 0:
        (folder / "out" / "checkpoints" / last).rename(folder / "away")
    comm.Barrier()
    assert cli.main([*words, "--resume"]) == 0
    comm.Barrier()
    assert [line | TIMES for line in lines_of(folder)] == [line | TIMES for line in complete]


@pytest.mark.usefixtures("no_picture")
@pytest.mark.ranks(4)
def test_the_command_follows_a_plan(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = written(comm, shared_tmp_path)
    plan = ["--plan", str(planned(comm, data))]
    arguments = [word for word in command(comm, data, "--steps", "2") if word not in ("--grid", ONE_GRID[comm.size])]
    assert cli.main([*arguments, *plan]) == 0
    comm.Barrier()
    summary = json.loads((data / "out" / "summary.json").read_text())
    assert summary["plan"] == PLANS[comm.size]
    text = f"2 steps, a plan of {len(PLANS[comm.size])} patterns, samples on grid "
    assert (text in capsys.readouterr().out) == (comm.rank == 0)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_it_writes_metrics_a_summary_checkpoints_and_a_picture_and_resumes(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(comm, shared_tmp_path)
    assert cli.main(command(comm, data, "--epochs", "2", "--checkpoint-every", "4")) == 0
    comm.Barrier()
    lines = lines_of(data)
    assert_of_two_epochs(lines)
    assert set(lines[0]) == {"step", "epoch", "loss", "lr", "seconds", "samples_per_s"}
    summary = json.loads((data / "out" / "summary.json").read_text())
    assert summary["test_accuracy"] == lines[-1]["accuracy"] == lines[-1]["correct"] / 21
    assert summary["train_accuracy"] == lines[-2]["correct"] / 40
    assert summary["final_loss"] == lines[-3]["loss"]
    assert summary["settings"]["model"] == "lenet5"
    assert sorted(p.name for p in (data / "out" / "checkpoints").glob("step-*")) == ["step-000004", "step-000006"]
    assert (data / "out" / "result.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    shown = f"test accuracy: {100 * lines[-1]['accuracy']:.2f} % ({lines[-1]['correct']} of 21)"
    assert (shown in printed) == (comm.rank == 0)
    assert ("on 40 samples of 1 x 28 x 28, batch 16, 6 steps" in printed) == (comm.rank == 0)
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)
    again = command(comm, data, "--epochs", "2", "--checkpoint-every", "0")
    assert cli.main([*again, "--resume"]) == 0  # from the end
    comm.Barrier()
    assert [line | TIMES for line in lines_of(data)] == [line | TIMES for line in lines]
    assert_resumes_with_the_same_lines(comm, data, "step-000006", again)  # from the middle of the second epoch
    capsys.readouterr()
    text = "written with different settings: augment was '' and is 'crop'"
    assert_refused(capsys, [*again, "--resume", "--augment", "crop"], text)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "users_nets:cells"],
            "the outputs for images of (1, 28, 28) are (16, 10, 28, 28), but a classifier returns",
        ),
        (
            ["--model", "users_nets:few"],
            "the outputs for images of (1, 28, 28) are (16, 4), but a classifier returns (samples, classes)",
        ),
        (["--augment", "turn"], "argument --augment: 'turn' is not a list of crop,flip"),
        (["--plan", "plan.json"], "argument --plan: not allowed with argument --grid"),
        (["--resume"], "--resume: no finished checkpoint in"),
        (["--test-data", "nowhere"], "No such file or directory"),
        (["--data", "mnist"], "mnist: no such file or folder. Use MNIST (train-images-idx3-ubyte and "),
    ],
    ids=lambda value: value[1] if isinstance(value, list) and len(value) > 1 else "",
)
def test_bad_input_is_one_line_and_code_2(
    comm: Any, users_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(capsys, command(comm, users_folder, *arguments), message, among_notes=True)


@pytest.mark.ranks(2)
def test_a_plan_that_does_not_fit_is_refused(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(comm, shared_tmp_path)
    written(comm, data, lambda folder: dc.Plan({"c9": {"n": 1}}).save(folder / "layer.json"))
    written(comm, data, lambda folder: dc.Plan({"*": {"n": 1}}, ranks=8).save(folder / "ranks.json"))
    for name, reason in (
        ("layer", "plan: 'c9' matches no layer of LeNet5"),
        ("ranks", f"plan: made for 8 ranks, but there are {comm.size}"),
        ("none", "none.json cannot be read: No such file or directory"),
    ):
        assert_refused(capsys, ["train", "classify", "--data", str(data), "--plan", str(data / f"{name}.json")], reason)
