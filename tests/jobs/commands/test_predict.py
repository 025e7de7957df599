"""``distconv predict``: on any grid that of one process, whatever is predicted; killed jobs go on; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import distconv as dc
from distconv import cli, writing
from distconv.data import open_source
from tests.jobs.command_lines import assert_refused
from tests.jobs.mesh.mesh_files import written
from tests.jobs.prediction import nets

pytestmark = pytest.mark.ranks(1, 4)

X = np.random.default_rng(6).standard_normal((3, 2, 10, 12, 9))
LABEL = np.random.default_rng(7).integers(0, 3, (3, 10, 12, 9))
MODEL = ["--model", "tests.jobs.prediction.nets:volume_net", "--classes", "3"]
GRID = {1: "n=1", 4: "d=2,h=2"}


def volumes(comm: Any, folder: Path) -> Any:
    """The data and weights; the network."""
    if comm.rank == 0:
        with h5py.File(folder / "ct.h5", "w") as file:
            file.create_dataset("image", data=X, chunks=(1, 2, 5, 4, 9))
            file.create_dataset("label", data=LABEL, chunks=(1, 5, 4, 9))
    net = nets.save(str(folder / f"net{comm.rank}.pt"))
    comm.Barrier()
    return net


def command(comm: Any, folder: Path, out: str, *more: str) -> list[str]:
    return [
        "predict",
        str(folder / "net0.pt"),
        *("--data", str(folder / "ct.h5"), "--out", str(folder / out), "--dtype", "float64"),
        *("--grid", GRID[comm.size], *MODEL, *more),
    ]


def values_of(path: Path, comm: Any) -> Any:
    source = open_source(path, ["prediction"], comm)
    return source.read("prediction", tuple(dc.Interval(0, extent) for extent in source.shape("prediction")))


@pytest.mark.long
def test_volumes_on_a_grid_are_those_of_one_process_with_scores_and_a_picture(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zarr")
    form = {1: "h5", 4: "zarr"}[comm.size]
    net = volumes(comm, shared_tmp_path)
    assert cli.main(command(comm, shared_tmp_path, "out", "--format", form, "--batch", "2")) == 0
    with torch.no_grad():
        expected = torch.softmax(net(torch.from_numpy(X)), 1).numpy()
    assert np.abs(values_of(shared_tmp_path / "out" / f"prediction.{form}", comm) - expected).max() < 1e-12
    called, label = expected.argmax(1), LABEL
    summary = json.loads((shared_tmp_path / "out" / "summary.json").read_text())
    assert summary["accuracy"] == pytest.approx((called == label).mean(), abs=1e-15)
    dice = [2 * ((called == k) & (label == k)).sum() / ((called == k).sum() + (label == k).sum()) for k in range(3)]
    assert summary["dice"] == pytest.approx(dice, abs=1e-15)
    if comm.rank == 0:
        assert (shared_tmp_path / "out" / "result.png").stat().st_size > 5000
        assert "accuracy" in capsys.readouterr().out


def test_windows_are_those_of_monai_and_raw_is_what_the_network_gives(comm: Any, shared_tmp_path: Path) -> None:
    inferers = pytest.importorskip("monai.inferers", reason="needs the package monai")
    net = volumes(comm, shared_tmp_path)
    more = ["--window", "d=8,h=5,w=9", "--overlap", "0.5", "--batch", "4", "--raw", "--format", "h5"]
    assert cli.main(command(comm, shared_tmp_path, "out", *more)) == 0
    with torch.no_grad():
        expected = inferers.sliding_window_inference(
            torch.from_numpy(X), (8, 5, 9), 1, net, overlap=0.5, mode="gaussian"
        ).numpy()
    assert np.abs(values_of(shared_tmp_path / "out" / "prediction.h5", comm) - expected).max() < 1e-6


@pytest.mark.long
@pytest.mark.ranks(4)
@pytest.mark.parametrize("window", [[], ["--window", "d=8,h=8", "--overlap", "0.5", "--batch", "3"]])
def test_a_job_that_was_stopped_goes_on(
    comm: Any, shared_tmp_path: Path, window: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zarr")
    volumes(comm, shared_tmp_path)
    assert cli.main(command(comm, shared_tmp_path, "whole", *window)) == 0
    write, begins = writing.Output.write, []

    def stopping(self: Any, begin: int, tensor: Any) -> None:
        if begin == 2 and len(begins) < 3:
            raise KeyboardInterrupt
        begins.append(begin)
        write(self, begin, tensor)

    monkeypatch.setattr(writing.Output, "write", stopping)
    with pytest.raises(KeyboardInterrupt):
        cli.main(command(comm, shared_tmp_path, "out", *window))
    begins.append(-1)
    with pytest.raises(dc.DataError, match="is incomplete"):
        open_source(shared_tmp_path / "out" / "prediction.zarr", ["prediction"], comm)
    assert cli.main(command(comm, shared_tmp_path, "out", *window)) == 0
    assert begins == [0, 1, -1, 2]
    found, whole = (values_of(shared_tmp_path / name / "prediction.zarr", comm) for name in ("out", "whole"))
    assert np.array_equal(found, whole)


@pytest.mark.ranks(1)
def test_what_does_not_fit_is_one_line(comm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volumes(comm, tmp_path)
    for more, reason in {
        ("--window", "w=4,c=2"): "--window: samples of (10, 12, 9) have the axes d, h, w, not c",
        ("--overlap", "1"): "'1' is not a number of at least 0 and below 1",
        ("--image-name", "none"): "there is no dataset 'none' in it",
        ("--label-name", "none"): "there is no dataset 'none' in it",
        ("--classes", "4"): "the weights do not fit --model",
    }.items():
        assert_refused(capsys, command(comm, tmp_path, "out", *more), reason)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_a_run_on_meshes_scales_others_as_its_own(comm: Any, shared_tmp_path: Path) -> None:
    mesh, run = written(shared_tmp_path / "mesh.h5", comm), shared_tmp_path / "run"
    train = ["--width", "2", "--steps", "2", "--dtype", "float64", "--grid", f"h={comm.size}"]
    assert cli.main(["train", "mesh", "--data", str(mesh), "--out", str(run), *train]) == 0
    if comm.rank == 0:  # held-out samples alone, of other moments, without labels
        with h5py.File(mesh) as file, h5py.File(shared_tmp_path / "new.h5", "w") as new:
            new.create_dataset("input", data=file["heldout/input"][:1], chunks=(1, 18, 16, 32))
    comm.Barrier()
    for data in ("mesh.h5", "new.h5"):
        out = str(shared_tmp_path / f"out-{data}")
        more = ["--out", out, "--format", "h5", "--grid", f"h={comm.size}"]
        assert cli.main(["predict", str(run), "--data", str(shared_tmp_path / data), *more]) == 0
    both, alone = (values_of(shared_tmp_path / f"out-{data}" / "prediction.h5", comm) for data in ("mesh.h5", "new.h5"))
    assert both.shape == (3, 1, 32, 32) and np.abs(both[:1] - alone).max() < 1e-14
    assert "dice" in json.loads((shared_tmp_path / "out-mesh.h5" / "summary.json").read_text())
    assert "dice" not in json.loads((shared_tmp_path / "out-new.h5" / "summary.json").read_text())


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("task", ["classify", "sequence"])
def test_a_classifiers_accuracy_is_that_of_its_training(comm: Any, shared_tmp_path: Path, task: str) -> None:
    run, out, axis = shared_tmp_path / "run", shared_tmp_path / "out", {"classify": "h", "sequence": "w"}[task]
    data = {"classify": "digits", "sequence": "embedded"}[task]
    more = ["--data", "digits", "--max-train-samples", "64"] if task == "classify" else ["--length", "12"]
    grid = ["--grid", f"{axis}={comm.size}"]
    assert cli.main(["train", task, "--out", str(run), "--steps", "1", *more, *grid]) == 0
    assert cli.main(["predict", str(run), "--data", data, "--out", str(out), "--format", "h5", *grid]) == 0
    trained, predicted = (json.loads((path / "summary.json").read_text()) for path in (run, out))
    assert predicted["accuracy"] == trained["test_accuracy"]
    assert predicted["loss"] == pytest.approx(trained["test_loss"], rel=1e-5)
    values = values_of(out / "prediction.h5", comm)
    assert np.abs(values.sum(1) - 1).max() < 1e-5 and values.shape[1] == 10
