"""``distconv train pointcloud``: what it writes, how it resumes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import distconv as dc
from distconv import cli
from distconv.jobs.pointcloud.classification import samples
from distconv.jobs.pointcloud.folders import convert
from distconv.jobs.training.picture import ResultFigure
from distconv.pipeline import PipelinePlan
from tests.jobs.command_lines import assert_refused
from tests.jobs.commands.test_train_classify import assert_of_two_epochs, assert_resumes_with_the_same_lines, lines_of
from tests.jobs.images.image_files import written
from tests.jobs.pointcloud.cloud_files import write_modelnet, write_ours

GRIDS = {1: "n=1", 2: "d=2"}


def command(comm: Any, folder: Path, *more: str) -> list[str]:
    small = "--width 2 --batch 2 --resolution 16 --points 30".split()
    out = ["--out", str(folder / "out"), "--grid", GRIDS[comm.size]]
    return ["train", "pointcloud", "--data", str(folder / "clouds.h5"), *small, *out, *more]


def with_clouds(comm: Any, folder: Path) -> Path:
    return written(comm, folder, lambda place: write_ours(place / "clouds.h5"))


@pytest.mark.long
@pytest.mark.ranks(1, 2)
def test_it_writes_metrics_a_summary_checkpoints_and_a_picture_and_resumes(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_clouds(comm, shared_tmp_path)
    assert cli.main(command(comm, folder, "--epochs", "2", "--checkpoint-every", "4")) == 0
    comm.Barrier()
    lines = lines_of(folder)
    assert_of_two_epochs(lines)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["test_accuracy"] == lines[-1]["accuracy"] == lines[-1]["correct"] / 2
    assert summary["train_accuracy"] == lines[-2]["correct"] / 5
    assert summary["baselines"]["majority vote"] == 0.5
    assert 0 <= summary["baselines"]["perceptron on points"] <= 1
    assert summary["classes"] == ["a", "b", "c"]
    assert (summary["settings"]["resolution"], summary["settings"]["points"]) == (16, 30)
    assert sorted(p.name for p in (folder / "out" / "checkpoints").glob("step-*")) == ["step-000004", "step-000006"]
    assert (folder / "out" / "result.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    for text in (
        "on 5 samples of 30 points, ",
        "of a majority vote: 50.00 %",
        "test accuracy: ",
        "of a perceptron on points: ",
    ):
        assert (text in printed) == (comm.rank == 0)
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)
    again = command(comm, folder, "--epochs", "2", "--checkpoint-every", "0")
    assert_resumes_with_the_same_lines(comm, folder, "step-000006", again)
    capsys.readouterr()
    assert_refused(capsys, [*again, "--resume", "--keep", "0.5"], "different settings: keep was 1.0 and is 0.5")


@pytest.mark.ranks(2)
def test_a_folder_of_meshes_without_held_out_ones_is_trained_on(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)
    folder = written(comm, shared_tmp_path, lambda place: write_modelnet(place / "meshes", test=0))
    convert(folder / "meshes", folder / "clouds.h5", comm, 100)
    assert cli.main(command(comm, folder, "--steps", "2")) == 0
    comm.Barrier()
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert "test_accuracy" not in summary and summary["baselines"] == {}
    assert ("no held-out clouds to test on" in capsys.readouterr().out) == (comm.rank == 0)


def test_without_data_it_trains_on_the_embedded_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "SHAPES", {"train": 10, "test": 10})
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)
    arguments = ["train", "pointcloud", "--steps", "1", "--width", "1", "--points", "60", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert "on 10 samples of 60 points, embedded shapes, batch 16, 1 steps" in capsys.readouterr().out


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "0"], "argument --keep: '0' is not a number above 0 and at most 1"),
        (["--keep", "half"], "argument --keep: 'half' is not a number above 0 and at most 1"),
        (["--keep", "0.01"], "--keep 0.01: no point is left of 30. Use a larger --keep or --points"),
        (["--resolution", "2000000"], "resolution=2000000: must be 1 to 1048576 voxels along each side"),
        (["--model", "pointnet"], "argument --model: invalid choice: 'pointnet'"),
        (["--grid", "c=2"], "axis c splits none of them. Use n, d, h, w"),
        (["--data", "nowhere.h5"], "nowhere.h5"),
        (["--resume"], "--resume: no finished checkpoint in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_code_2(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    folder = with_clouds(comm, shared_tmp_path)
    assert_refused(capsys, command(comm, folder, *arguments), message, among_notes=True)


def test_a_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dc.Plan({"*": {"n": 1}}, 1).save(tmp_path / "plan.json")
    text = "--plan: a sparse network has the same grid for all layers. Give it with --grid"
    assert_refused(capsys, ["train", "pointcloud", "--plan", str(tmp_path / "plan.json")], text)


# -- pipelines --------------------------------------------------------------------------------------------------------


def pipelined(folder: Path, *more: str) -> list[str]:
    small = "--width 2 --batch 2 --resolution 16 --points 30 --drop-last".split()
    return ["train", "pointcloud", "--data", str(folder / "clouds.h5"), *small, "--out", str(folder / "out"), *more]


@pytest.mark.long
@pytest.mark.ranks(2)
def test_a_pipeline_trains_resumes_and_says_where_it_was_cut(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)
    folder = with_clouds(comm, shared_tmp_path)
    arguments = ["--pipeline", "pipedream", "--weights", "stash", "--steps", "4", "--checkpoint-every", "2"]
    assert cli.main(pipelined(folder, *arguments)) == 0
    comm.Barrier()
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["pipeline"]["schedule"], summary["pipeline"]["weights"]) == ("pipedream", "stash")
    cut = summary["pipeline"]["cuts"]
    assert len(cut) == 1
    assert (f"pipedream of 2 stages split before {cut[0]} over 2 ranks" in capsys.readouterr().out) == (comm.rank == 0)
    assert_resumes_with_the_same_lines(comm, folder, "step-000004", pipelined(folder, *arguments))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ppv", "3"], "--ppv: only an option of pipelines"),
        (["--pipeline", "gpipe", "--ppv", "99"], "a register must come after one of the layers 1 to"),
        (["--pipeline-plan", "PLAN"], "its stages distribute layers, which a sparse network does not support"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_pipelines_that_cannot_be_are_refused(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    folder = with_clouds(comm, shared_tmp_path)
    plan = PipelinePlan("resnet", batch=2, ranks=2, cuts=(), replicas=(1,), plans=({"n": 2},), schedule="gpipe")
    if comm.rank == 0:
        plan.save(folder / "plan.json")
    comm.Barrier()
    given = [str(folder / "plan.json") if word == "PLAN" else word for word in arguments]
    assert_refused(capsys, pipelined(folder, *given), message, among_notes=True)
