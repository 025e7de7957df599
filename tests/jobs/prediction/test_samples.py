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
from distconv.data import Coordinate, Field, open_source
from distconv.data.coordinates import VariableLabels, join_labels
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


def predicted(comm: Any, folder: Path, data: Any, form: str, readers: int) -> Any:
    """xarray's data set of predictions that double the samples."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    comm.Barrier()
    inputs = open_inputs(options(data, readers=readers), of_task(), comm)
    more = {"out": folder / "out", "format": form, "batch": 3, "raw": True, "window": None, "readers": readers}
    more |= {"overlap": 0.25, "device": "cpu", "model": "mine", "normalise_as": None}
    run = PredictionRun(
        options(data, **more), TrainedNetwork(Path(), "", {}, {}, ""), inputs, Field("image", "nchw", torch.float64),
        dc.ProcessGrid(comm, h=comm.size), lambda x: x * 2,
    )  # fmt: skip
    written_file = run.write()
    inputs.close()
    comm.Barrier()
    engine = {"engine": "zarr", "consolidated": False} if form == "zarr" else {"engine": "h5netcdf"}
    with xarray.open_dataset(written_file, decode_times=False, **engine) as found:
        return found.load()


TIMES = {"units": "days since 2001-01-01", "calendar": "standard"}
LAT = ("lat", np.linspace(80, -80, X.shape[2]), {"units": "degrees_north"})


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("form", "readers"), [("zarr", 1), ("h5", 1), ("h5", 2)])
def test_predictions_have_the_dimensions_and_coordinates_of_the_samples(
    comm: Any, shared_tmp_path: Path, form: str, readers: int
) -> None:
    xarray = pytest.importorskip("xarray")
    path = shared_tmp_path / "samples.nc"
    coords = {"time": ("time", np.arange(len(X)), TIMES), "lat": LAT}
    if comm.rank == 0:
        xarray.Dataset({"image": (("time", "variable", "lat", "lon"), X)}, coords).to_netcdf(path, engine="h5netcdf")
    expected = xarray.Dataset({"prediction": (("time", "channel", "lat", "lon"), 2 * X)}, coords)
    xarray.testing.assert_identical(predicted(comm, shared_tmp_path, path, form, readers), expected)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.filterwarnings("ignore:.*a chunk of:UserWarning")
@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("kind", ["zarr", "nc"])
def test_predictions_of_several_files_have_the_coordinates_of_all(
    comm: Any, shared_tmp_path: Path, kind: str, readers: int
) -> None:
    """The second file has times in other units, and the last one other longitudes, which are left out."""
    xarray = pytest.importorskip("xarray")
    parts = [(slice(0, 2), 0, "2001-01-01"), (slice(2, 3), 0, "2001-01-03"), (slice(3, 4), 3, "2001-01-01")]
    if comm.rank == 0:
        for number, (part, first, since) in enumerate(parts):
            times = ("time", first + np.arange(part.stop - part.start), {**TIMES, "units": f"days since {since}"})
            coords = {"time": times, "lat": LAT, "lon": np.arange(5.0) + (number == 2)}
            data = xarray.Dataset({"image": (("time", "variable", "lat", "lon"), X[part])}, coords)
            name = shared_tmp_path / f"part{number}.{kind}"
            data.to_netcdf(name, engine="h5netcdf") if kind == "nc" else data.to_zarr(name, consolidated=False)
    found = predicted(comm, shared_tmp_path, Path(f"{shared_tmp_path}/part*.{kind}"), "h5", readers)
    coords = {"time": ("time", np.arange(4), TIMES), "lat": LAT}
    expected = xarray.Dataset({"prediction": (("time", "channel", "lat", "lon"), 2 * X)}, coords)
    xarray.testing.assert_identical(found, expected)


@pytest.mark.ranks(1)
def test_times_of_other_calendars_are_left_out_with_a_warning() -> None:
    def times(calendar: str) -> VariableLabels:
        stored = Coordinate(("time",), np.arange(2), {**TIMES, "calendar": calendar})
        return VariableLabels(("time", "x"), {"time": stored}, {"units": "K", "calendar": calendar})

    with pytest.warns(UserWarning, match="coordinates 'time' are left out: a: the files have times of different"):
        found = join_labels("a", [times("standard"), times("noleap")])
    assert found.dims == ("time", "x") and not found.coords and found.attributes == {"units": "K"}
    assert join_labels("a", [found, VariableLabels(("time", "y"))]).dims is None


@pytest.mark.ranks(1, 2)
def test_files_of_one_sample_each_count_samples_in_a_dimension_of_its_own(comm: Any, shared_tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    if comm.rank == 0:
        for number, values in enumerate(X):
            data = xarray.Dataset({"image": (("variable", "lat", "lon"), values)}, {"lat": LAT})
            data.to_netcdf(shared_tmp_path / f"part{number}.nc", engine="h5netcdf")
    comm.Barrier()
    with open_source(f"{shared_tmp_path}/part*.nc", ["image"], comm, one_each=True) as source:
        labels = source.labels("image")
    assert labels.dims == ("sample", "variable", "lat", "lon") and list(labels.coords) == ["lat"]
    assert np.array_equal(labels.coords["lat"].values, LAT[1])
