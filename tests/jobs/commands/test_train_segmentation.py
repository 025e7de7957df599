"""``distconv train segmentation``: what it writes, that predict goes on from it, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from distconv import checkpoint, cli
from distconv.data import open_source
from distconv.parameters.weight_files import read_weights
from tests.jobs.command_lines import assert_refused
from tests.jobs.segmentation.label_maps import GRIDS, arrays, net, written

pytestmark = pytest.mark.ranks(1, 2, 4)


def command(comm: Any, path: Path, out: Path, *more: str) -> list[str]:
    grid = ",".join(f"{axis}={parts}" for axis, parts in GRIDS[comm.size].items())
    model = ["--model", "tests.jobs.segmentation.label_maps:net", "--ignore-label", "255", "--dtype", "float64"]
    return ["train", "segmentation", "--data", str(path), "--out", str(out), "--grid", grid, *model, *more]


@pytest.mark.long
@pytest.mark.ranks(4)
def test_it_trains_evaluates_and_predicts(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(shared_tmp_path / "a.h5", comm), shared_tmp_path / "out"
    more = ["--epochs", "2", "--crop", "h=6", "--mirror", "wh", "--class-weights", "1,2,1", "--loss"]
    assert cli.main(command(comm, path, out, *more, "cross-entropy+dice")) == 0
    comm.Barrier()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("evaluation")) for line in lines] == [
        (1, None), (2, None), (3, None), (3, "test"), (4, None), (5, None), (6, None), (6, "test"),
    ]  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    assert summary["settings"]["mirror"] == "hw" and summary["group"] == "test"
    assert summary["dice"] == lines[-1]["dice"] and len(summary["iou"]) == 3
    if comm.rank == 0:
        assert "test: accuracy" in capsys.readouterr().out
        assert (out / "result.png").stat().st_size > 10000
    grid = ",".join(f"{axis}={parts}" for axis, parts in GRIDS[comm.size].items())
    at = ["--data", str(path), "--out", str(shared_tmp_path / "predicted"), "--grid", grid]
    assert cli.main(["predict", str(out), *at]) == 0
    comm.Barrier()
    predicted = json.loads((shared_tmp_path / "predicted" / "summary.json").read_text())
    assert (predicted["dice"], predicted["iou"]) == (summary["dice"], summary["iou"])
    # By plain torch, with the weights of the run.
    exported = shared_tmp_path / "weights.pt"
    assert cli.main(["checkpoint", "export", str(out), "--out", str(exported)]) == 0
    plain = net(2, 3).double()
    plain.load_state_dict(torch.load(exported, weights_only=True))
    image, (held_out, label) = arrays()[0], arrays(samples=3, seed=1)
    mean, std = (np.asarray(each).reshape(-1, 1, 1) for each in (image.mean((0, 2, 3)), image.std((0, 2, 3))))
    with torch.no_grad():
        expected = torch.softmax(plain(torch.from_numpy((held_out - mean) / std)), 1).numpy()
    source = open_source(next((shared_tmp_path / "predicted").glob("prediction.*")), ["prediction"], comm)
    box = tuple(dc.Interval(0, extent) for extent in source.shape("prediction"))
    assert np.abs(source.read("prediction", box) - expected).max() < 1e-11
    valid = label != 255
    assert summary["accuracy"] == (expected.argmax(1) == label)[valid].mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--mirror", "x"], "argument --mirror: 'x' is not a list of the axes d, h and w"),
        (
            ["--class-weights", "1,a"],
            "argument --class-weights: '1,a' is neither balanced nor a list of non-negative numbers",
        ),
        (["--class-weights", "0,0"], "argument --class-weights: '0,0' is neither"),
        (["--crop", "h"], "argument --crop: grid 'h'"),
        (["--class-weights", "1,2"], "--class-weights 1.0,2.0: 2 weights for 3 classes"),
        (["--image-name", "ct"], "there is no dataset 'train/ct'"),
    ],
)
def test_what_is_wrong_is_one_line(
    comm: Any, shared_tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(shared_tmp_path / "a.h5", comm)
    assert_refused(capsys, command(comm, path, shared_tmp_path / "out", *words), reason)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_averages_are_evaluated_predicted_with_exported_and_begun_with(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take longer than the steps
    path, out = written(shared_tmp_path / "a.h5", comm), shared_tmp_path / "out"
    assert cli.main(command(comm, path, out, "--epochs", "3", "--ema", "0.8", "--accumulate", "2", "--lr", "0.05")) == 0
    exported, last = shared_tmp_path / "weights.pt", shared_tmp_path / "last.pt"
    assert cli.main(["checkpoint", "export", str(out), "--out", str(exported)]) == 0
    assert cli.main(["checkpoint", "export", str(out), "--out", str(last), "--no-average"]) == 0
    comm.Barrier()
    found = checkpoint.load(next(out.glob("checkpoints/step-000009")), comm).tensors
    for where, kind in ((exported, "average"), (last, "model")):
        state = read_weights(where, comm)
        assert {f"{kind}/{name}" for name in state} == {name for name in found if name.startswith(f"{kind}/")}
        assert all(torch.equal(tensor, found[f"{kind}/{name}"]) for name, tensor in state.items())
    # With a rate that changes nothing the scores of the averages are those of a run that begins with them.
    again = command(comm, path, shared_tmp_path / "again", "--steps", "1", "--optimizer", "sgd", "--lr", "1e-30")
    assert cli.main([*again, "--init-from", str(exported)]) == 0
    at = ["--data", str(path), "--out", str(shared_tmp_path / "predicted")]
    assert cli.main(["predict", str(out), *at]) == 0
    comm.Barrier()
    names = ("out", "again", "predicted")
    summaries = [json.loads((shared_tmp_path / name / "summary.json").read_text()) for name in names]
    assert summaries[0]["dice"] == summaries[1]["dice"] == summaries[2]["dice"]
