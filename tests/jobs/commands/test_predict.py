"""``distconv predict``: volumes on a grid as in one process; stopped jobs; options; labelled samples; bad input."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv import cli, writing
from distconv.data import open_source
from distconv.errors import GridError
from distconv.jobs.commands import predict
from distconv.jobs.prediction.network import TrainedNetwork
from distconv.jobs.prediction.windows import blending_weights
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused, noting, parsed
from tests.jobs.prediction import nets

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
@pytest.mark.ranks(4)
def test_volumes_on_a_grid_are_those_of_one_process_with_scores_and_a_picture(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zarr")
    net = volumes(comm, shared_tmp_path)
    assert cli.main(command(comm, shared_tmp_path, "out", "--format", "zarr", "--batch", "2")) == 0
    with torch.no_grad():
        expected = torch.softmax(net(torch.from_numpy(X)), 1).numpy()
    assert np.abs(values_of(shared_tmp_path / "out" / "prediction.zarr", comm) - expected).max() < 1e-12
    called, label = expected.argmax(1), LABEL
    summary = json.loads((shared_tmp_path / "out" / "summary.json").read_text())
    assert summary["accuracy"] == pytest.approx((called == label).mean(), abs=1e-15)
    dice = [2 * ((called == k) & (label == k)).sum() / ((called == k).sum() + (label == k).sum()) for k in range(3)]
    assert summary["dice"] == pytest.approx(dice, abs=1e-15)
    if comm.rank == 0:
        assert (shared_tmp_path / "out" / "result.png").stat().st_size > 5000
        assert "accuracy" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.ranks(4)
def test_a_job_that_was_stopped_goes_on(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zarr")
    window = ["--window", "d=8,h=8", "--overlap", "0.5", "--batch", "3"]
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
def test_a_classifiers_accuracy_is_that_of_its_training(comm: Any, shared_tmp_path: Path) -> None:
    run, out, grid = shared_tmp_path / "run", shared_tmp_path / "out", ["--grid", f"w={comm.size}"]
    assert cli.main(["train", "sequence", "--out", str(run), "--steps", "1", "--length", "12", *grid]) == 0
    assert cli.main(["predict", str(run), "--data", "embedded", "--out", str(out), "--format", "h5", *grid]) == 0
    trained, predicted = (json.loads((path / "summary.json").read_text()) for path in (run, out))
    assert predicted["accuracy"] == trained["test_accuracy"]
    assert predicted["loss"] == pytest.approx(trained["test_loss"], rel=1e-5)
    values = values_of(out / "prediction.h5", comm)
    assert np.abs(values.sum(1) - 1).max() < 1e-5 and values.shape[1] == 10


class Inputs(SimpleNamespace):
    """Samples of a shape."""

    def close(self) -> None:
        pass


class Grid(SimpleNamespace):
    """A grid without ranks."""

    def describe(self) -> str:
        return "a grid"


def test_calls_of_a_prediction_are_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    runs = [((5, 2, 90), "float64", ""), ((5, 2, 9, 8), "float32", ""), ((5, 2, 7, 9, 8), None, "")]
    more = ["--grid n=2,w=3", "--dtype float32", "--dtype float64", "--raw", "--device cpu"]
    for shape, dtype, words in runs + [((5, 2, 9, 8), "float64", words) for words in more]:
        lines.append(f"samples {shape}, trained in {dtype}: predict {words}")
        of = TrainedNetwork(Path("run"), "mesh", {} if dtype is None else {"dtype": dtype}, {"ignore": 7}, "digest")
        results = {
            "select_device": "a device",
            "find_network": of,
            "open_inputs": Inputs(shape=shape),
            "loader_field": "a field",
            "ProcessGrid": Grid(),
            "build_network": "a network",
            "distribute_network": "a network on a grid",
            "PredictionRun": SimpleNamespace(write=lambda: Path("prediction.zarr")),
            "score": SimpleNamespace(results={"dice": 1}),
            "try_on_all_ranks": "picture: x",
            "_write_summary": None,
        }
        for name, result in results.items():
            monkeypatch.setattr(predict, name, noting(lines, name, result))
        monkeypatch.setattr(predict.labelled, "is_labelled", noting(lines, "is_labelled", False))
        monkeypatch.setattr(predict, "MPI", SimpleNamespace(COMM_WORLD=SimpleNamespace(size=6, rank=0)))
        assert predict.run(parsed("predict", "run", "--data", "x.h5", "--out", "out", *words.split())) == 0
    assert_approved("prediction-calls", "\n".join(lines))


def test_a_grid_has_no_axis_that_the_samples_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "ProcessGrid", lambda comm, **extents: extents)
    for dimensions, lacking in ((3, "dh"), (4, "d"), (5, "")):
        for axis in "ndhw":
            options: Any = SimpleNamespace(grid={"d": 1, axis: 2})
            if axis in lacking:
                with pytest.raises(GridError, match=f"^--grid: the samples have no axis {axis}. Use axes of"):
                    predict._grid(options, MPI.COMM_SELF, dimensions)
            else:
                assert predict._grid(options, MPI.COMM_SELF, dimensions) == options.grid


def test_labelled_samples_are_predicted_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Outcome(SimpleNamespace):
        def __str__(self) -> str:
            return "75.00 %"

    trained = TrainedNetwork(Path("run"), "classify", {}, {}, "digest")
    outcome = Outcome(accuracy=0.75, loss=0.5)
    monkeypatch.setattr(predict, "find_network", lambda path, comm: trained)
    monkeypatch.setattr(predict.labelled, "is_labelled", lambda of, data: (of, data) == (trained, Path("x.h5")))
    monkeypatch.setattr(predict.labelled, "predict", lambda *given: (Path("p.zarr"), "test", outcome))
    monkeypatch.setattr(predict, "peak_memory_bytes", lambda: 9)
    assert predict.run(parsed("predict", "run", "--data", "x.h5", "--out", str(tmp_path))) == 0
    assert capsys.readouterr().out == "test accuracy: 75.00 %\npredictions: p.zarr\n"
    text = (tmp_path / "summary.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
    assert json.loads(text) == {
        **{"weights": "run", "task": "classify", "data": "x.h5", "group": "test", "accuracy": 0.75, "loss": 0.5},
        **{"ranks": 1, "peak_memory_bytes": [9]},
    }


@pytest.mark.long
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("form", ["nii.gz", "h5"])
@pytest.mark.filterwarnings("ignore:.*a chunk of:UserWarning")
def test_predictions_of_nifti_volumes_have_their_space(
    comm: Any, shared_tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the first volume, and resumed."""
    nibabel = pytest.importorskip("nibabel")
    net = nets.save(str(shared_tmp_path / f"net{comm.rank}.pt"))
    affines = [np.diag([2.0, 1.5, 3.0, 1.0]) + number * np.eye(4, k=3) for number in range(3)]
    (shared_tmp_path / "scans").mkdir(exist_ok=True)
    if comm.rank == 0:
        for number, affine in enumerate(affines):
            image = nibabel.Nifti1Image(np.moveaxis(X[number], 0, -1), affine)
            image.header.set_xyzt_units("mm")
            nibabel.save(image, shared_tmp_path / "scans" / f"case-{number}.nii{'.gz' * (number % 2)}")
    comm.Barrier()
    more = ["predict", str(shared_tmp_path / "net0.pt"), "--data", f"{shared_tmp_path}/scans/*.nii*", *MODEL]
    more += ["--out", str(shared_tmp_path / "out"), "--dtype", "float64", "--grid", f"h={comm.size}"]
    more += ["--window", "d=8", "--overlap", "0.5", "--format", form, "--readers", "2"]
    write = writing.Output.write

    def stopping(self: Any, begin: int, tensor: Any) -> None:
        if begin == 1:
            raise KeyboardInterrupt
        write(self, begin, tensor)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(writing.Output, "write", stopping)
        cli.main(more)
    assert cli.main(more) == 0
    comm.Barrier()
    out = shared_tmp_path / "out"
    expected = [_by_windows(net, x[None])[0] for x in torch.from_numpy(X)]
    if form == "h5":
        assert np.allclose(values_of(out / "prediction.h5", comm), np.stack(expected), rtol=0, atol=1e-12)
        with h5py.File(out / "prediction.h5") as file:
            attributes = dict(file["prediction"].attrs)
            assert [each[0].name.rsplit("/")[-1] for each in file["prediction"].dims] == [
                "sample", "channel", "x", "y", "z",
            ]  # fmt: skip
        assert np.array_equal(np.reshape(attributes["affine"], (3, 4, 4)), affines)
        assert attributes["space_units"] == "mm"
        return
    assert sorted(each.name for each in (out / "prediction").iterdir()) == [f"case-{n}.nii.gz" for n in range(3)]
    for number, affine in enumerate(affines):
        image = nibabel.load(out / "prediction" / f"case-{number}.nii.gz")
        assert np.allclose(np.moveaxis(image.get_fdata(), -1, 0), expected[number], rtol=0, atol=1e-12)
        assert np.array_equal(image.affine, affine) and image.header.get_xyzt_units()[0] == "mm"


def _by_windows(net: Any, x: torch.Tensor) -> np.ndarray:
    """Windows of 8 along D, with the weights that test_windows compares with those of MONAI."""
    size = (8, *x.shape[3:])
    weight = blending_weights(size, [dc.Interval(0, extent) for extent in size], x.dtype)
    total, weights = torch.zeros(1, 3, *x.shape[2:], dtype=x.dtype), torch.zeros(x.shape[2:], dtype=x.dtype)
    with torch.no_grad():
        for begin in (0, 2):
            total[:, :, begin : begin + 8] += net(x[:, :, begin : begin + 8]) * weight
            weights[begin : begin + 8] += weight
    return torch.softmax(total / weights, 1).numpy()
