"""Values whose meaning is in attributes: in every format what xarray reads is what a box has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.data import open_source
from distconv.data.formats.hdf5_files import Hdf5File
from distconv.data.formats.zarr_groups import ZarrGroup
from distconv.distribution import Interval
from distconv.errors import DataError

xarray = pytest.importorskip("xarray")
pytest.importorskip("h5netcdf")

SHAPE = (3, 2, 5, 7)
DIMS = ("n", "c", "y", "x")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "scale, offset and fill": ("i2", {"scale_factor": 0.1, "add_offset": 5.0, "_FillValue": np.int16(7)}),
    "scale in float32": ("i2", {"scale_factor": np.float32(0.1)}),
    "offset in float32": ("i2", {"add_offset": np.float32(3)}),
    "scale of int32": ("i4", {"scale_factor": 0.5}),
    "missing_value": ("i2", {"missing_value": np.int16(5)}),
    "fill of uint8": ("u1", {"_FillValue": np.uint8(3)}),
    "fill of float32": ("f4", {"_FillValue": np.float32(4)}),
    "NaN fill": ("f4", {"_FillValue": np.float32(np.nan)}),
    "fill outside of the dtype": ("i2", {"missing_value": np.int32(-99999)}),
    "unsigned": ("i1", {"_Unsigned": "true"}),
    "unsigned, fill and scale": ("i1", {"_Unsigned": "true", "_FillValue": np.int8(-1), "scale_factor": 0.5}),
    "bool": ("i1", {"dtype": "bool"}),
    "valid_range": ("i2", {"valid_range": np.array([3, 50], "i2")}),
    "days since": ("i4", {"units": "days since 2000-01-01"}),
    "days": ("i4", {"units": "days"}),
    "plain": ("i4", {}),
}


def stored_values(case: str) -> tuple[NDArray[Any], dict[str, Any]]:
    dtype, attributes = CASES[case]
    values = np.random.default_rng(3).integers(0, 100, SHAPE)
    if case == "bool":
        values %= 2
    return (values - 50 * case.startswith("unsigned")).astype(dtype), attributes


def write_netcdf(path: Path, values: NDArray[Any], attributes: dict[str, Any], group: str = "/") -> NDArray[Any]:
    """Write stored values and attributes, unchanged; what xarray makes of them."""
    encoded = xarray.Dataset({"t": (DIMS, values, attributes)})
    encoded.to_netcdf(path, group=group, engine="h5netcdf", mode="a" if path.exists() else "w")
    with xarray.open_dataset(path, engine="h5netcdf", group=group, decode_times=False) as decoded:
        return np.asarray(decoded["t"].values)


def check_equal(path: Any, expected: NDArray[Any], name: str = "t", **options: Any) -> None:
    source = open_source(path, [name], MPI.COMM_SELF, **options)
    found = source.read(name, tuple(Interval(0, extent) for extent in expected.shape))
    part = source.read(name, tuple(Interval(1, extent) for extent in expected.shape))
    assert source.shape(name) == expected.shape
    source.close()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(part, expected[(slice(1, None),) * expected.ndim])


@pytest.mark.parametrize("case", CASES)
def test_netcdf_is_decoded_as_xarray_does_whatever_the_file_is_called(tmp_path: Path, case: str) -> None:
    values, attributes = stored_values(case)
    expected = write_netcdf(tmp_path / "a.nc", values, attributes)
    write_netcdf(tmp_path / "a.nc", values, attributes, "first/second")
    check_equal(tmp_path / "a.nc", expected)
    check_equal(tmp_path / "a.nc", expected, "first/second/t")
    if case == "scale, offset and fill":
        (tmp_path / "a.nc").rename(tmp_path / "a.h5")
        check_equal(tmp_path / "a.h5", expected)
        check_equal([tmp_path / "a.h5"] * 2, np.concatenate([expected] * 2))
        check_equal(f"{tmp_path}/*.h5", expected)
        check_equal(tmp_path, expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", "<>")
def test_attributes_of_a_plain_hdf5_dataset_are_decoded(tmp_path: Path, case: str, order: str) -> None:
    values, attributes = stored_values(case)
    expected = write_netcdf(tmp_path / "a.nc", values, attributes)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = values.astype(values.dtype.newbyteorder(order))  # type: ignore[arg-type]  # a literal in stubs
        file["t"].attrs.update(attributes)
    check_equal(tmp_path / "a.h5", expected)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("version", "consolidated"), [(2, True), (3, False)])
def test_a_zarr_group_of_xarray_is_decoded(tmp_path: Path, case: str, version: int, consolidated: bool) -> None:
    values, attributes = stored_values(case)
    path = tmp_path / "a.zarr"
    encoded = xarray.Dataset({"t": (DIMS, values, attributes)})
    encoded.to_zarr(path, zarr_format=version, consolidated=consolidated)
    with xarray.open_zarr(path, decode_times=False, chunks=None, consolidated=consolidated) as decoded:
        check_equal(path, np.asarray(decoded["t"].values))


@pytest.mark.parametrize("version", [2, 3])
def test_the_fill_value_of_a_plain_zarr_array_masks_nothing(tmp_path: Path, version: int) -> None:
    import zarr

    values = np.arange(24).reshape(4, 6)
    zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version).create_array("t", data=values, fill_value=0)
    check_equal(tmp_path / "a.zarr", values)


@pytest.mark.long
def test_each_file_of_a_list_has_its_own_attributes(tmp_path: Path) -> None:
    values, _ = stored_values("plain")
    expected = [
        write_netcdf(tmp_path / f"{index}.nc", values.astype("i2"), {"scale_factor": 0.5 + index, "add_offset": 1.0})
        for index in range(3)
    ]
    files = [tmp_path / f"{index}.nc" for index in range(3)]
    check_equal(files, np.concatenate(expected))
    check_equal(files, np.stack(expected), one_each=True)


def test_a_column_is_decoded(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"], file["mass"] = np.zeros((3, 2)), np.array([1, 2, 3], "i2")
        file["mass"].attrs["scale_factor"] = 0.5
    assert Hdf5File(tmp_path / "a.h5", ["t"]).column("mass") == [0.5, 1.0, 1.5]
    xarray.Dataset({"t": ("n", np.zeros(2)), "mass": ("n", np.array([1, 2], "i2"), {"scale_factor": 0.5})}).to_zarr(
        tmp_path / "a.zarr", zarr_format=2
    )
    assert ZarrGroup(tmp_path / "a.zarr", ["t"]).column("mass") == [0.5, 1.0]


def test_a_virtual_dataset_that_lost_the_attributes_of_its_source_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["t"] = np.arange(6, dtype="i2").reshape(3, 2)
        file["t"].attrs["scale_factor"] = 0.5
    layout = h5py.VirtualLayout((3, 2), "i2")
    layout[:] = h5py.VirtualSource("part.h5", "t", (3, 2))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("t", layout)
    with pytest.raises(DataError, match="'t' lacks the attributes scale_factor of its source"):
        open_source(tmp_path / "all.h5", ["t"], MPI.COMM_SELF)
    with h5py.File(tmp_path / "all.h5", "a") as file:
        file["t"].attrs["scale_factor"] = 0.5
    check_equal(tmp_path / "all.h5", np.arange(6).reshape(3, 2) * 0.5)


def test_without_xarray_packed_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_netcdf(tmp_path / "a.nc", *stored_values("scale of int32"))
    write_netcdf(tmp_path / "b.nc", *stored_values("plain"))
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(DataError, match=r"attributes \(scale_factor\) .* pip install 'distconv\[netcdf\]'"):
        open_source(tmp_path / "a.nc", ["t"], MPI.COMM_SELF)
    check_equal(tmp_path / "b.nc", stored_values("plain")[0])


def test_attributes_that_nothing_decodes_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = np.zeros((3, 2), "i2")
        file["t"].attrs["scale_factor"] = "ten"
    with pytest.raises(DataError, match=r"'t' has attributes \(scale_factor\) that xarray cannot decode"):
        open_source(tmp_path / "a.h5", ["t"], MPI.COMM_SELF)


def test_missing_records_of_netcdf_are_refused(tmp_path: Path) -> None:
    import h5netcdf

    with h5netcdf.File(tmp_path / "a.nc", "w") as file:
        file.dimensions = {"time": None, "x": 3}
        file.create_variable("long", ("time", "x"), "f4")
        file.create_variable("short", ("time", "x"), "f4")
        file.resize_dimension("time", 5)
    with h5py.File(tmp_path / "a.nc", "a") as raw:
        raw["long"][:] = 1
        raw["short"].resize((2, 3))
        raw["short"][:] = 1
    check_equal(tmp_path / "a.nc", np.ones((5, 3), "f4"), "long")
    with pytest.raises(DataError, match="'short' has 2 of the 5 entries of its unlimited dimension '/time'"):
        open_source(tmp_path / "a.nc", ["short"], MPI.COMM_SELF)


@pytest.mark.parametrize("group", ["/", "inner"])
def test_a_variable_of_netcdf_may_have_the_name_of_a_dimension(tmp_path: Path, group: str) -> None:
    values = np.arange(12.0).reshape(3, 4)
    data = xarray.Dataset({"t": (("n", "x"), values)})
    data.to_netcdf(tmp_path / "a.nc", engine="h5netcdf", group=group)
    import h5netcdf

    with h5netcdf.File(tmp_path / "a.nc", "a") as file:
        (file if group == "/" else file[group]).create_variable("x", ("n", "x"), "f8", data=values + 1)
    check_equal(tmp_path / "a.nc", values + 1, "x" if group == "/" else "inner/x")


def test_strings_of_netcdf_are_no_samples(tmp_path: Path) -> None:
    for name, values in {"words": np.array(["a", "b"], object), "letters": np.array([b"ab", b"cd"], "S2")}.items():
        xarray.Dataset({name: (("n",), values)}).to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
        with pytest.raises(DataError, match=f"dataset '{name}'"):
            Hdf5File(tmp_path / f"{name}.nc", [name])
