"""Variables on a grid: batches are those that xarray reads from the same files, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.data import Field, Loader, latitude_weights, moments, open_gridded
from distconv.errors import DataError
from tests.distconv.layouts import grid_over, raises_everywhere

xarray = pytest.importorskip("xarray")
pytest.importorskip("zarr")
pytestmark = [
    pytest.mark.ranks(1, 2, 4),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*a chunk of:UserWarning"),
]

LEVELS = (850.0, 500.0, 250.0)
TIMES = 14
HOURS = {"units": "hours since 2001-01-01", "calendar": "standard"}
PACKED = {
    "t2m": {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768},
    "z": {"dtype": "int16", "scale_factor": 0.5, "add_offset": 100.0, "_FillValue": -32768},
}


def reanalysis(first: int = 0, times: int = TIMES, step: int = 6) -> Any:
    """Two variables, one with levels, NaN over land, and a mask without times."""
    rng = np.random.default_rng(first)
    land = np.random.default_rng(99).random((9, 12)) < 0.3
    t2m = 280 + rng.standard_normal((times, 9, 12)) * 10
    t2m[:, land] = np.nan
    return xarray.Dataset(
        {
            "t2m": (("time", "lat", "lon"), t2m, {"units": "K"}),
            "z": (("time", "level", "lat", "lon"), rng.standard_normal((times, 3, 9, 12)) * 50 + 100),
            "land": (("lat", "lon"), land.astype("float32")),
        },
        coords={
            "time": ("time", (first + np.arange(times)) * step, HOURS),
            "level": ("level", np.array(LEVELS)),
            "lat": ("lat", np.linspace(80, -80, 9), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(12) * 30.0, {"units": "degrees_east"}),
        },
    )  # fmt: skip


def store(comm: Any, folder: Path, form: str) -> Any:
    """Write the data on rank 0; return the path, or the paths, and what xarray reads there."""
    paths = {"zarr": ["era.zarr"], "zarr 2": ["era.zarr"], "nc": ["era.nc"], "several nc": ["a.nc", "b.nc"]}
    paths |= {"several zarr": ["a.zarr", "b.zarr"]}
    names = [folder / name for name in paths[form]]
    parts = [reanalysis()] if len(names) == 1 else [reanalysis(0, 5), reanalysis(5, 9)]
    if comm.rank == 0:
        for name, part in zip(names, parts, strict=True):
            if "zarr" in form:
                part.to_zarr(name, encoding=PACKED, zarr_format=2 if form == "zarr 2" else 3, consolidated=False)
            else:
                encoding = {
                    key: {**value, "chunksizes": (1, 3, 9, 5)[-part[key].ndim :]} for key, value in PACKED.items()
                }
                part.to_netcdf(name, engine="h5netcdf", encoding=encoding, unlimited_dims=["time"])
    comm.Barrier()
    engine = {"engine": "zarr", "consolidated": False} if "zarr" in form else {"engine": "h5netcdf"}
    read = [xarray.open_dataset(name, decode_times=False, **engine) for name in names]
    expected = xarray.concat(read, "time", data_vars="minimal", coords="minimal", compat="override").load()
    for each in read:
        each.close()
    return (names[0] if len(names) == 1 else names), expected


def grid_for(comm: Any) -> dc.ProcessGrid:
    return grid_over(comm, **{1: {"n": 1}, 2: {"h": 2}, 4: {"h": 2, "w": 2}}[comm.size])


def batches(source: Any, comm: Any, *fields: Field, batch: int = 3) -> list[list[torch.Tensor]]:
    loader = Loader(source, fields, grid_for(comm), batch, shuffle=False)
    return [[dc.gather(tensor) for tensor in each.tensors] for each in loader.epoch(0)]


def channels(expected: Any, at: int, variables: list[str], levels: Any = LEVELS) -> np.ndarray:
    rows = []
    for name in variables:
        of = expected[name]
        of = of.isel(time=at) if "time" in of.dims else of
        of = of.sel(level=list(levels)) if "level" in of.dims else of.expand_dims("level")
        rows.append(of.values.astype("float64"))
    return np.concatenate(rows)


@pytest.mark.parametrize("form", ["zarr", "zarr 2", "nc", "several nc", "several zarr"])
def test_batches_are_what_xarray_reads(comm: Any, shared_tmp_path: Path, form: str) -> None:
    path, expected = store(comm, shared_tmp_path, form)
    datasets = {"x": ["t2m", "z", "land"], "y": ["z"]}
    with open_gridded(path, datasets, comm, lag={"y": (1, 2)}, times=slice(2, None), every=2) as source:
        steps = list(range(2, TIMES - 2, 2))
        assert source.shape("x") == (len(steps), 5, 9, 12) and source.shape("y") == (len(steps), 6, 9, 12)
        assert source.channel_names("y")[3:5] == ["z level=850 at +2", "z level=500 at +2"]
        assert list(source.sample_times(1).values) == [6 * (step + 1) for step in steps]
        with pytest.raises(DataError, match=r"sample_times\(-3\): steps -1 to"):
            source.sample_times(-3)
        assert source.column("time") == [6 * step for step in steps]
        assert source.coords["lat"].attributes["units"] == "degrees_north"
        assert np.array_equal(source.coords["time"].values, 6 * np.arange(TIMES))
        assert source.variable_attributes("t2m") == {"units": "K"}
        found = batches(source, comm, Field("x", "nchw", torch.float64), Field("y", "nchw", torch.float64))
    x, y = (torch.cat(each).numpy() for each in zip(*found, strict=True))
    for row, step in enumerate(steps):
        assert np.array_equal(x[row], channels(expected, step, ["t2m", "z", "land"]), equal_nan=True)
        later = [channels(expected, step + lag, ["z"]) for lag in (1, 2)]
        assert np.array_equal(y[row], np.concatenate(later))


@pytest.mark.long
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("form", ["several zarr", "several nc"])
def test_reading_processes_read_the_same(comm: Any, shared_tmp_path: Path, form: str) -> None:
    path, _ = store(comm, shared_tmp_path, form)
    options = {"lag": {"y": (1, 2)}, "levels": {"level": (250, 850)}}
    found = {}
    for readers in (1, 2):
        with open_gridded(path, {"x": ["t2m", "z", "land"], "y": ["z"]}, comm, readers=readers, **options) as source:
            assert source.readers == readers and source.column("time") == [6 * step for step in range(TIMES - 2)]
            fields = Field("x", "nchw", torch.float64), Field("y", "nchw", torch.float64)
            found[readers] = batches(source, comm, *fields)
            server = source._processes and source._processes._server
        assert (server is not None) == (readers == 2) and (server is None or server.poll() is not None)
    for one, two in zip(found[1], found[2], strict=True):
        assert all(torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9)) for a, b in zip(one, two, strict=True))


@pytest.mark.ranks(1, 2)
def test_a_number_of_reading_processes_is_checked(comm: Any, shared_tmp_path: Path) -> None:
    path, _ = store(comm, shared_tmp_path, "zarr")
    raises_everywhere(comm, DataError, "0 reading processes; ask for at least one",
                      lambda: open_gridded(path, {"x": ["z"]}, comm, readers=0))  # fmt: skip


@pytest.mark.parametrize("form", ["zarr", "nc"])
@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
def test_names_along_a_dimension_are_no_coordinate(comm: Any, shared_tmp_path: Path, form: str) -> None:
    path, values = shared_tmp_path / f"named.{form}", np.random.default_rng(1).random((3, 2, 4, 5))
    if comm.rank == 0:
        data = xarray.Dataset({"state": (("time", "variable", "lat", "lon"), values)}, {"variable": ["u", "v"]})
        data.to_zarr(path, consolidated=False) if form == "zarr" else data.to_netcdf(path, engine="h5netcdf")
    comm.Barrier()
    with open_gridded(path, {"x": ["state"]}, comm) as source:
        assert source.channel_names("x") == ["state variable=0", "state variable=1"] and not source.coords
        found = torch.cat([x for (x,) in batches(source, comm, Field("x", "nchw", torch.float64))]).numpy()
    assert np.array_equal(found, values)


def test_levels_and_periods_are_selected_as_by_xarray(comm: Any, shared_tmp_path: Path) -> None:
    path, expected = store(comm, shared_tmp_path, "several nc")
    period = ("2001-01-02", "2001-01-03")
    with open_gridded(path, {"x": ["z"]}, comm, levels={"level": (250, 850)}, times=period) as source:
        found = torch.cat([x for (x,) in batches(source, comm, Field("x", "nchw", torch.float64))]).numpy()
        assert source.channel_names("x") == ["z level=250", "z level=850"]
    decoded = xarray.decode_cf(expected).sel(time=slice(*period))
    assert np.array_equal(found, decoded["z"].sel(level=[250, 850]).values)


def test_files_whose_times_have_other_units_are_joined_as_by_xarray(comm: Any, shared_tmp_path: Path) -> None:
    names = [shared_tmp_path / name for name in ("a.nc", "b.nc")]
    if comm.rank == 0:
        later = reanalysis(4, 3)
        later["time"] = ("time", [0, 6, 12], {"units": "hours since 2001-01-02", "calendar": "standard"})
        for name, part in zip(names, (reanalysis(0, 4), later), strict=True):
            part.to_netcdf(name, engine="h5netcdf")
    comm.Barrier()
    with open_gridded(names, {"x": ["t2m"]}, comm, lag={"x": (0, 1)}) as source:
        assert list(source.coords["time"].values) == [0, 6, 12, 18, 24, 30, 36]


def test_statistics_leave_out_missing_values_and_batches_replace_them(comm: Any, shared_tmp_path: Path) -> None:
    path, expected = store(comm, shared_tmp_path, "zarr")
    with open_gridded(path, {"x": ["t2m", "z"]}, comm) as source:
        raises_everywhere(comm, DataError, "NaN or infinite values in 14 samples", lambda: moments(source, "x"))
        found = moments(source, "x", missing=True)
        field = Field("x", "nchw", torch.float64, shift=found.mean, scale=found.std, fill=0.0)
        x = torch.cat([x for (x,) in batches(source, comm, field)]).numpy()
    values = np.stack([channels(expected, step, ["t2m", "z"]) for step in range(TIMES)])
    axes = (0, 2, 3)
    assert found.mean == pytest.approx(np.nanmean(values, axes), rel=1e-12)
    assert found.std == pytest.approx(np.nanstd(values, axes), rel=1e-9)
    assert np.array_equal(found.low, np.nanmin(values, axes)) and np.array_equal(found.high, np.nanmax(values, axes))
    scaled = (values - found.mean[:, None, None]) / found.std[:, None, None]
    assert np.allclose(x, np.nan_to_num(scaled), rtol=1e-12) and (x[:, 0] == 0).any()


def test_a_channel_without_any_value_raises(comm: Any) -> None:
    source = dc.data.BoxFunction(
        {"x": (2, 1, 3)}, lambda name, box: np.full([s.stop - s.start for s in box], np.nan), comm
    )
    raises_everywhere(comm, DataError, "all values of channel 0 of 'x' are missing",
                      lambda: moments(source, "x", missing=True))  # fmt: skip


def test_latitude_weights_are_relative_areas() -> None:
    edges = np.linspace(-90, 90, 181)
    centres = (edges[1:] + edges[:-1]) / 2
    areas = np.diff(np.sin(np.deg2rad(edges)))
    weights = latitude_weights(centres)
    assert weights.shape == (180, 1) and torch.allclose(weights[:, 0], torch.from_numpy(areas / areas.mean()))
    with pytest.raises(DataError, match="must be -90 to 90"):
        latitude_weights([100.0])


def gap(data: Any) -> Any:
    times = data["time"].values.copy()
    times[6:] += 24
    return data.assign_coords(time=("time", times, data["time"].attrs))


def back(data: Any) -> Any:
    return data.isel(time=[0, 1, 3, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])


WRONG = {
    "unknown variable": (None, {"x": ["t3m"]}, {}, "no dataset 't3m'"),
    "no variables": (None, {"x": []}, {}, "no variables are named"),
    "lag of no dataset": (None, {"x": ["t2m"]}, {"lag": {"y": 1}}, "lag names 'y', which is no dataset"),
    "lag of no steps": (None, {"x": ["t2m"]}, {"lag": {"x": ()}}, "lag of 'x' is"),
    "every": (None, {"x": ["t2m"]}, {"every": 0}, "every=0"),
    "levels": (None, {"x": ["z"]}, {"levels": {"level": (700,)}}, "'level' has no level 700"),
    "levels of space": (None, {"x": ["z"]}, {"levels": {"lat": (80,)}}, "levels='lat' is not a dimension of levels"),
    "period": (None, {"x": ["z"]}, {"times": ("1999", "2000")}, "no sample is left"),
    "too long a lag": (None, {"x": ["z"]}, {"lag": {"x": 14}}, "no sample is left"),
    "stride of times": (None, {"x": ["z"]}, {"times": slice(0, 9, 2)}, "Pass every=2"),
    "gap": (gap, {"x": ["z"]}, {"lag": {"x": 1}}, "times have a gap of 30 between the steps 5 and 6"),
    "order": (back, {"x": ["z"]}, {"lag": {"x": 1}}, "times do not increase from step 2 to 3"),
    "no times": (None, {"x": ["land"]}, {}, "no variable has times"),
    "other order": (lambda data: data.transpose("lat", "lon", "time", "level"), {"x": ["t2m"]}, {}, "but must have"),
    "other grid": (lambda data: data.assign(u=(("time", "y", "x"), np.zeros((TIMES, 4, 4)))), {"x": ["t2m", "u"]}, {},
                   "variable 'u' is on the grid"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_raises_on_all_ranks(comm: Any, shared_tmp_path: Path, name: str) -> None:
    change, datasets, options, text = WRONG[name]
    path = shared_tmp_path / "wrong.zarr"
    if comm.rank == 0:
        (change or (lambda data: data))(reanalysis()).to_zarr(path, consolidated=False)
    comm.Barrier()
    raises_everywhere(comm, DataError, text, lambda: open_gridded(path, datasets, comm, **options))


def test_files_with_other_coordinates_raise(comm: Any, shared_tmp_path: Path) -> None:
    names = [shared_tmp_path / name for name in ("a.nc", "b.nc")]
    if comm.rank == 0:
        other = reanalysis(5, 9)
        other["lat"] = other["lat"] + 1
        for name, part in zip(names, (reanalysis(0, 5), other), strict=True):
            part.to_netcdf(name, engine="h5netcdf")
    comm.Barrier()
    raises_everywhere(comm, DataError, "its coordinates differ", lambda: open_gridded(names, {"x": ["t2m"]}, comm))


def test_a_volume_without_levels_is_read_with_three_dimensions_of_space(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "flow.zarr"
    values = np.random.default_rng(0).random((3, 4, 6, 8))
    if comm.rank == 0:
        xarray.Dataset({"u": (("t", "z", "y", "x"), values)}).to_zarr(path, consolidated=False)
    comm.Barrier()
    with open_gridded(path, {"x": ["u"]}, comm, time="t", space=3) as source:
        assert source.shape("x") == (3, 1, 4, 6, 8)
        found = torch.cat([x for (x,) in batches(source, comm, Field("x", "ncdhw", torch.float64))])
    assert np.array_equal(found[:, 0].numpy(), values)
