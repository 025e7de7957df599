"""netCDF: what xarray reads itself is what a box has, packed values too; nothing of other files."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from distconv.data.formats.netcdf import NetCdf
from distconv.errors import DataError
from tests.distconv.data import stored_samples
from tests.distconv.data.stored_samples import arrays

xarray = pytest.importorskip("xarray")
pytest.importorskip("h5netcdf")


def test_packed_values_are_decoded_as_xarray_does(tmp_path: Path) -> None:
    path = tmp_path / "packed.nc"
    values = np.random.default_rng(0).normal(280, 20, (3, 8, 9))
    values[1, 2, 3] = np.nan
    encoding = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768, "chunksizes": (1, 4, 4)}
    xarray.Dataset({"t": (("time", "y", "x"), values)}).to_netcdf(path, encoding={"t": encoding}, engine="h5netcdf")
    with xarray.open_dataset(path, engine="h5netcdf") as whole:
        expected = whole["t"].values
    store = NetCdf(path, ["t"])
    box = (slice(1, 2), slice(1, 7), slice(2, 9))
    assert np.array_equal(store.read("t", box), expected[box], equal_nan=True)
    assert np.isnan(store.read("t", box)).sum() == 1
    assert store.stored["t"].dtype == expected.dtype and store.stored["t"].chunks == (1, 4, 4)


def test_groups_and_attributes(tmp_path: Path) -> None:
    path = tmp_path / "groups.nc"
    data = xarray.Dataset({"image": (("n", "c", "y", "x"), arrays()["image"])}, attrs={"threshold": 0.4})
    data.to_netcdf(path, group="train/first", engine="h5netcdf")
    store = NetCdf(path, ["train/first/image"])
    box = (slice(2, 4), slice(0, 3), slice(5, 9), slice(1, 20))
    assert np.array_equal(store.read("train/first/image", box), arrays()["image"][box])
    assert store.attribute("threshold", "train/first") == 0.4 and store.attribute("threshold", "none") is None
    store.close()


def test_what_lies_elsewhere_or_is_missing_is_refused(tmp_path: Path) -> None:
    path = stored_samples.write(tmp_path / "data", "netcdf")
    with pytest.raises(DataError, match="there is no dataset 'none' in it; at its top are "):
        NetCdf(path, ["none"])
    with h5py.File(path, "a") as file:
        file["away"] = h5py.ExternalLink("/etc/passwd", "x")
    with pytest.raises(DataError, match="'away' lies in other files"):
        NetCdf(path, ["image"])


def test_times_are_no_samples_and_a_classic_file_is_no_hdf5(tmp_path: Path) -> None:
    path = tmp_path / "times.nc"
    xarray.Dataset({"name": (("n",), np.array(["a", "b"], dtype=object))}).to_netcdf(path, engine="h5netcdf")
    with pytest.raises(DataError, match="dataset 'name'"):
        NetCdf(path, ["name"])
    (tmp_path / "classic.nc").write_bytes(b"CDF\x01" + bytes(100))
    with pytest.raises(DataError, match="cannot be opened as HDF5"):
        NetCdf(tmp_path / "classic.nc", ["t"])
