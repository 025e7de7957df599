"""Samples of predictions: the datasets that are found, scaled values, and probabilities of outputs."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import distconv as dc
from distconv.data import Field, open_source
from distconv.errors import DataError
from distconv.jobs.prediction import samples
from distconv.jobs.prediction.network import TrainedNetwork
from distconv.jobs.prediction.samples import PredictionRun, loader_field, open_inputs, probabilities

pytestmark = pytest.mark.ranks(1, 2)

X = np.random.default_rng(3).normal(2, 3, (4, 2, 6, 5))


def options(path: Path, **more: Any) -> argparse.Namespace:
    given = {"data": path, "image_name": None, "label_name": None, "readers": 1, "normalise_as": None}
    return argparse.Namespace(**given | more)


def written(comm: Any, path: Path, *names: str) -> Path:
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            for name in names:
                file[name] = X if "label" not in name else X[:, 0] > 2
    comm.Barrier()
    return path


def of_task(task: str = "") -> TrainedNetwork:
    return TrainedNetwork(Path(), task, {}, {}, "")


@pytest.mark.parametrize(
    ("names", "task", "found", "label"),
    [
        (("image", "label"), "", "image", "label"),
        (("train/image", "test/image", "test/label"), "classify", "test/image", "test/label"),
        (("train/input", "train/label", "heldout/input"), "mesh", "heldout/input", None),
        (("train/image", "train/label"), "", "train/image", "train/label"),
    ],
)
def test_held_out_samples_come_first(
    comm: Any, shared_tmp_path: Path, names: tuple[str, ...], task: str, found: str, label: str | None
) -> None:
    inputs = open_inputs(options(written(comm, shared_tmp_path / "a.h5", *names)), of_task(task), comm)
    assert inputs.name == found and (inputs.labels is not None) == (label is not None)
    assert label is None or inputs.label == label
    inputs.close()


def test_a_name_that_is_given_is_taken(comm: Any, shared_tmp_path: Path) -> None:
    path = written(comm, shared_tmp_path / "a.h5", "image", "ct", "label", "other_label")
    inputs = open_inputs(options(path, image_name="ct", label_name="other_label"), of_task(), comm)
    assert (inputs.name, inputs.label) == ("ct", "other_label")
    for more in ({"image_name": "none"}, {"label_name": "none"}):
        with pytest.raises(DataError, match="there is no dataset 'none'"):
            open_inputs(options(path, **more), of_task(), comm)
    with pytest.raises(DataError, match="there is no dataset 'input'"):
        open_inputs(options(path), of_task("mesh"), comm)


def test_values_are_scaled_as_in_training_or_as_those_of_other_samples(comm: Any, shared_tmp_path: Path) -> None:
    path = written(comm, shared_tmp_path / "a.h5", "image")
    inputs = open_inputs(options(path), of_task(), comm)

    def of(**notes: Any) -> TrainedNetwork:
        return TrainedNetwork(path, "", {}, notes, "")

    assert loader_field(options(path), of(), inputs, torch.float64).shift is None
    noted = loader_field(options(path), of(mean=[1.0, 2.0], std=[3.0, 4.0]), inputs, torch.float64)
    assert noted.shift.tolist() == [1, 2] and noted.scale.tolist() == [3, 4]
    other = loader_field(options(path, normalise_as=path), of(mean=[1.0, 2.0], std=[3.0, 4.0]), inputs, torch.float64)
    assert np.allclose(other.shift, X.mean((0, 2, 3))) and np.allclose(other.scale, X.std((0, 2, 3)))
    with pytest.raises(DataError, match="has 2 channels, but the network was trained with 3"):
        loader_field(options(path), of(mean=[1.0] * 3, std=[1.0] * 3), inputs, torch.float64)


def test_probabilities_are_of_classes_or_of_the_one_class(comm: Any) -> None:
    grid = dc.ProcessGrid(comm, h=comm.size)
    x = torch.from_numpy(X)
    assert torch.allclose(dc.gather(probabilities(dc.scatter(x, grid))), torch.softmax(x, 1))
    assert torch.allclose(dc.gather(probabilities(dc.scatter(x[:, :1], grid))), torch.sigmoid(x[:, :1]))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("window", "raw"), [(None, True), ({"h": 4}, False), ({"h": 4, "w": 9}, True)])
def test_predictions_are_written_with_what_must_not_change(
    comm: Any, tmp_path: Path, window: dict[str, int] | None, raw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network doubles its input, so windows blend to the same values. Rows in the file are not predicted again."""
    inputs = open_inputs(options(written(comm, tmp_path / "a.h5", "image")), of_task(), comm)
    more = {"out": tmp_path / "new" / "out", "format": "h5", "batch": 3, "raw": raw, "window": window}
    more |= {"overlap": 0.25, "device": "cpu", "model": "mine", "normalise_as": Path("b.h5")}
    trained = TrainedNetwork(Path(), "", {}, {}, "digest")
    seen: list[Any] = []

    def model(x: Any) -> Any:
        seen.append(tuple(x.shape))
        return x * 2

    run = PredictionRun(
        options(tmp_path / "a.h5", **more), trained, inputs, Field("image", "nchw", torch.float64),
        dc.ProcessGrid(comm), model,
    )  # fmt: skip
    extents = None if window is None else (4, 5)
    assert run.window == extents and run._note == {
        "weights": "digest", "data": f"{tmp_path / 'a.h5'}: image", "window": None if extents is None else [4, 5],
        "overlap": 0.25, "raw": raw, "model": "mine", "normalise_as": "b.h5",
    }  # fmt: skip
    monkeypatch.setattr(samples, "count_written_rows", lambda path, comm: 0)
    assert run.write() == tmp_path / "new" / "out" / "prediction.h5"
    places = [3, 1] if window is None else [3, 3, 2]
    assert seen == [(count, 2, *(extents or (6, 5))) for count in places]
    expected = torch.from_numpy(X) * 2
    expected = expected if raw else torch.softmax(expected, 1)
    found = open_source(tmp_path / "new" / "out" / "prediction.h5", ["prediction"], comm)
    values = found.read("prediction", tuple(dc.Interval(0, extent) for extent in expected.shape))
    torch.testing.assert_close(torch.from_numpy(values), expected)
    rows: list[int] = []
    output = SimpleNamespace(write=lambda begin, values: rows.append(begin), finish=lambda: rows.append(-1))
    monkeypatch.setattr(samples, "open_output", lambda *given, **named: output)
    for done in (3, 9):  # the last row is always predicted again
        seen.clear()
        monkeypatch.setattr(samples, "count_written_rows", lambda path, comm, done=done: done)
        run.write()
        assert len(seen) == 1
    assert rows == [3, -1, 3, -1]
    inputs.close()


@pytest.mark.ranks(1)
def test_windows_and_networks_that_do_not_fit_are_refused(comm: Any, tmp_path: Path) -> None:
    inputs = open_inputs(options(written(comm, tmp_path / "a.h5", "image")), of_task(), comm)
    more = {"out": tmp_path, "format": "h5", "batch": 3, "raw": True, "overlap": 0.25, "device": "cpu", "model": "m"}

    def run(model: Any, window: Any = None) -> PredictionRun:
        field, grid = Field("image", "nchw", torch.float64), dc.ProcessGrid(comm)
        return PredictionRun(options(tmp_path, **more, window=window), of_task(), inputs, field, grid, model)

    with pytest.raises(DataError, match=r"--window: samples of \(6, 5\) have the axes h, w, not d"):
        run(None, {"h": 2, "d": 3}).write()
    with pytest.raises(DataError, match="the network returns list, but a prediction is a tensor"):
        run(lambda x: [x]).write()
    with pytest.raises(DataError, match=r"the network returns \(3, 2, 4, 2\) for windows of \(4, 5\), but windows"):
        run(lambda x: x[..., :2], {"h": 4}).write()
    inputs.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("form", ["zarr", "h5"])
def test_predictions_have_the_dimensions_and_coordinates_of_the_samples(
    comm: Any, shared_tmp_path: Path, form: str
) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    path = shared_tmp_path / "samples.nc"
    times = {"units": "days since 2001-01-01", "calendar": "noleap"}
    coords = {"time": ("time", np.arange(len(X)), times), "lat": np.linspace(80, -80, X.shape[2])}
    if comm.rank == 0:
        xarray.Dataset({"image": (("time", "variable", "lat", "lon"), X)}, coords).to_netcdf(path, engine="h5netcdf")
    comm.Barrier()
    inputs = open_inputs(options(path), of_task(), comm)
    more = {"out": shared_tmp_path / "out", "format": form, "batch": 3, "raw": True, "window": None}
    more |= {"overlap": 0.25, "device": "cpu", "model": "mine", "normalise_as": None}
    run = PredictionRun(
        options(path, **more), TrainedNetwork(Path(), "", {}, {}, ""), inputs, Field("image", "nchw", torch.float64),
        dc.ProcessGrid(comm, h=comm.size), lambda x: x * 2,
    )  # fmt: skip
    written_file = run.write()
    inputs.close()
    comm.Barrier()
    engine = {"engine": "zarr", "consolidated": False} if form == "zarr" else {"engine": "h5netcdf"}
    with xarray.open_dataset(written_file, decode_times=False, **engine) as found:
        expected = xarray.Dataset({"prediction": (("time", "channel", "lat", "lon"), 2 * X)}, coords)
        xarray.testing.assert_identical(found.load(), expected)
