"""Ranks write the full tensor together, each chunk by one rank; unfinished files are marked."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from distconv import writing
from distconv.data import open_source
from distconv.errors import DataError
from distconv.writing import chunk_aligned_bounds, count_written_rows, open_output
from tests.distconv.data.sample_files import common

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

GRIDS = {1: ["n=1"], 2: ["h=2", "n=2", "c=2"], 3: ["w=3", "h=3"], 4: ["h=2,w=2", "n=2,h=2", "r=2,w=2"]}
X = torch.from_numpy(np.random.default_rng(4).standard_normal((5, 3, 37, 150)))
FORMATS = ["zarr", "h5"]


def needed(form: str) -> None:
    if form == "zarr":
        pytest.importorskip("zarr")


def values_of(path: Path, comm: Any, name: str = "values") -> Any:
    source = open_source(path, [name], comm)
    found = source.read(name, tuple(dc.Interval(0, extent) for extent in source.shape(name)))
    source.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
def test_the_whole_tensor_is_there_whatever_the_grid(comm: Any, shared_tmp_path: Path, form: str) -> None:
    needed(form)
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        for index, (tensor, dims) in enumerate(((X, None), (X[0, 0, 0].float(), "w"), (X[:, 0].bfloat16(), "nhw"))):
            path = shared_tmp_path / f"{text}-{index}.{form}"
            dc.write(dc.scatter(tensor, grid, dims=dims), path)
            comm.Barrier()
            expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            assert np.array_equal(values_of(path, comm), expected.numpy())


@pytest.mark.ranks(2, 3, 4)
def test_no_two_ranks_write_one_chunk(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed("zarr")
    put, written = writing._ZarrOutput._write_block, []

    def noted(self: Any, box: Any, block: Any) -> None:
        ranges = (
            range(i.start // chunk, -(-i.stop // chunk)) for i, chunk in zip(box, self._array.chunks, strict=True)
        )
        written.extend(itertools.product(*ranges))
        put(self, box, block)

    monkeypatch.setattr(writing._ZarrOutput, "_write_block", noted)
    for text in GRIDS[comm.size]:
        written.clear()
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        dc.write(dc.scatter(X, grid), shared_tmp_path / f"{text}.zarr")
        chunks = list(itertools.chain(*comm.allgather(written)))
        assert len(chunks) == len(set(chunks)) == 5 * 4 * 4  # of 1 x 3 x 10 x 38
        if not set(text) & {"c", "r"}:
            assert all(comm.allgather(bool(written)))


@pytest.mark.parametrize(
    ("extent", "chunk", "parts", "offset"),
    [(10, 4, 3, 0), (10, 4, 3, 3), (1, 4, 3, 2), (0, 4, 2, 1), (64, 8, 4, 0), (8, 4, 2, 8)],
)
@pytest.mark.ranks(1)
def test_blocks_end_at_the_borders_of_chunks(comm: Any, extent: int, chunk: int, parts: int, offset: int) -> None:
    found = chunk_aligned_bounds(extent, chunk, parts, offset)
    assert found[0] == 0 and found[-1] == extent and list(found) == sorted(found) and len(found) == parts + 1
    assert all((offset + border) % chunk == 0 for border in found[1:-1] if 0 < border < extent)
    lengths = [stop - start for start, stop in itertools.pairwise(found)]
    assert max(lengths) <= chunk * -(-((offset + extent - 1) // chunk + 1 - offset // chunk) // parts) or not extent


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.ranks(2)
def test_what_is_not_finished_says_so_and_is_gone_on_with(comm: Any, shared_tmp_path: Path, form: str) -> None:
    needed(form)
    path, shape, note = shared_tmp_path / f"out.{form}", tuple(X.shape), {"weights": "a"}
    over_h, over_w = dc.ProcessGrid(comm, h=2), dc.ProcessGrid(comm, w=2)
    output = open_output(path, "y", shape, X.dtype, comm, note=note)
    output.write(0, dc.scatter(X[:2] + 1, over_h))
    output.write(0, dc.scatter(X[:2], over_h))  # as after a kill between writing and noting
    output.write(2, dc.scatter(X[2:3], over_h))
    with pytest.raises(DataError, match="3 of 5 rows are written"):
        output.finish()
    for begin, rows in ((4, X[4:]), (3, X), (0, X[:2, :2])):
        with pytest.raises(DataError, match="do not fit after 3 rows"):
            output.write(begin, dc.scatter(rows, over_h))
    with pytest.raises(DataError) as caught:
        open_source(path, ["y"], comm)
    assert "incomplete" in common(comm, caught.value) or form == "h5"
    with pytest.raises(DataError, match=r"already exists|contains another unfinished output"):
        open_output(path, "y", shape, X.dtype, comm, note={"weights": "b"})
    assert count_written_rows(path, comm) == 3
    output = open_output(path, "y", shape, X.dtype, comm, note=note)
    assert output.rows == 3
    output.write(0, dc.scatter(X[:2], over_h))  # fewer rows
    assert count_written_rows(path, comm) == 2
    output.write(2, dc.scatter(X[2:], over_w))
    output.finish()
    assert np.array_equal(values_of(path, comm, "y"), X.numpy())
    for attempt in (lambda: count_written_rows(path, comm), lambda: dc.write(dc.scatter(X, over_h), path)):
        with pytest.raises(DataError, match=r"already exists\. Remove it, or choose another name"):
            attempt()


def test_other_endings_and_other_files_are_refused(comm: Any, shared_tmp_path: Path) -> None:
    x = dc.scatter(X, dc.ProcessGrid(comm, h=comm.size))
    with pytest.raises(
        DataError, match=r"unknown output format. Name a zarr group, NAME\.zarr, an HDF5 file, NAME\.h5"
    ):
        dc.write(x, shared_tmp_path / "x.npy")
    if comm.rank == 0:
        (shared_tmp_path / "x.h5.parts").mkdir()
        (shared_tmp_path / "x.h5.parts" / "other").touch()
    comm.Barrier()
    with pytest.raises(DataError) as caught:
        dc.write(x, shared_tmp_path / "x.h5")
    assert "contains other files" in common(comm, caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", FORMATS)
def test_what_cannot_be_written_is_refused_before_anything_is_made(comm: Any, shared_tmp_path: Path, form: str) -> None:
    x = dc.scatter(X, dc.ProcessGrid(comm, h=2))
    wrong: list[tuple[Any, Any, str]] = [
        (x.sum(), "values", "a single number has no rows. Write x.reshape"),
        (X, "values", "write: a Tensor is not distributed. Pass a distributed tensor"),
        (X.numpy(), "values", "write: a ndarray is not distributed"),
        (x, "", "'' is not a valid dataset name"),
        (x, "/", "'/' is not a valid dataset name"),
        (x, 3, "3 is not a valid dataset name"),
        (torch.complex(x, x), "values", "torch.complex128 is not a real NumPy dtype"),
    ]
    for tensor, name, reason in wrong:
        with pytest.raises(DataError, match=reason) as caught:
            dc.write(tensor, shared_tmp_path / f"x.{form}", name)
        common(comm, caught.value)
    assert not list(shared_tmp_path.iterdir())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", FORMATS)
def test_names_need_not_be_utf8_nor_plain(comm: Any, shared_tmp_path: Path, form: str) -> None:
    needed(form)
    x = dc.scatter(X, dc.ProcessGrid(comm, h=2))
    for name in (b"caf\xe9", b"50%", b"a[1]", b"caf\xc3\xa9 b"):
        path = Path(os.fsdecode(os.fsencode(shared_tmp_path) + b"/" + name + f".{form}".encode()))
        if form == "h5" and name in (b"caf\xe9", b"50%"):
            with pytest.raises(
                DataError, match="HDF5 cannot open parts whose names contain % or are not UTF-8"
            ) as caught:
                dc.write(x, path)
            common(comm, caught.value)
            continue
        dc.write(x, path)
        comm.Barrier()
        assert np.array_equal(values_of(path, comm), X.numpy())


@pytest.mark.ranks(2)
def test_a_relative_path_stays_what_it_was_when_the_process_changes_its_folder(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shared_tmp_path)
    output = open_output("out.h5", "y", tuple(X.shape), X.dtype, comm, note={})
    monkeypatch.chdir("/")
    output.write(0, dc.scatter(X, dc.ProcessGrid(comm, h=2)))
    output.finish()
    assert np.array_equal(values_of(shared_tmp_path / "out.h5", comm, "y"), X.numpy())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"rows": 2', "cannot be read as JSON"),
        ("[]", "found a list, expected a mapping with the keys rows, whole, pieces"),
        ('{"rows": "2", "whole": "y", "pieces": []}', "rows: found '2', expected an integer"),
    ],
)
def test_a_damaged_note_of_progress_is_one_error_on_all_ranks(
    comm: Any, shared_tmp_path: Path, text: str, reason: str
) -> None:
    note = shared_tmp_path / "out.h5.parts" / "progress.json"
    if comm.rank == 0:
        note.parent.mkdir()
        note.write_text(text)
    comm.Barrier()
    with pytest.raises(DataError, match=rf"progress\.json.*{reason}") as caught:
        writing.write(
            dc.scatter(torch.ones(3, 2), dc.ProcessGrid(comm, n=comm.size), dims="nc"), shared_tmp_path / "out.h5"
        )
    common(comm, caught.value)


ENDS = {(0, 4, 5): (4, 5, 11), (0, 1, 1): (1, 9, 11), (0, 6, 3, 5): (6, 8, 5, 11), (0, 10, 10): (10, 11, 11)}
"""First rows of several writes, in order, and for each the row after its last."""


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(11,), (11, 2, 70)], ids=str)
@pytest.mark.parametrize("begins", ENDS, ids=str)
def test_rows_are_written_from_wherever_they_begin(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, shape: tuple[int, ...], begins: Any
) -> None:
    """Again where they were written already, in the middle of chunks, and with fewer rows than ranks."""
    needed(form)
    monkeypatch.setattr(writing, "_ROWS", 4)
    expected, path = np.zeros(shape), shared_tmp_path / f"o.{form}"
    for axes in ("n", "h"):
        target = path.with_stem(axes)
        grid = dc.ProcessGrid(comm, **{axes: comm.size})
        dims = ("n", *"hw"[: len(shape) - 1])
        output = open_output(target, "values", shape, torch.float64, comm, note={})
        for number, (begin, end) in enumerate(zip(begins, ENDS[begins], strict=True)):
            rows = torch.from_numpy(np.random.default_rng(number).standard_normal((end - begin, *shape[1:])))
            output.write(begin, dc.scatter(rows, dc.Distribution(grid, tuple(a if a == axes else None for a in dims))))
            expected[begin:end] = rows.numpy()
        output.finish()
        comm.Barrier()
        assert np.array_equal(values_of(target, comm), expected)


def labelled(comm: Any) -> tuple[dict[str, Any], Any]:
    """Two tensors over rows with dimensions and coordinates, and xarray's dataset of them."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    times = xarray.DataArray([0, 6, 12], dims="time", attrs={"units": "hours since 2001-01-01", "calendar": "noleap"})
    arrays = {name: np.random.default_rng(seed).random((3, 8, 5)) for seed, name in enumerate(("t2m", "z"))}
    dims, attrs = ("time", "lat", "lon"), {"t2m": {"units": "K", "range": [1, 2.5]}, "z": {}}
    coords = {
        "time": dc.data.Coordinate(("time",), times.values, times.attrs),
        "lat": np.linspace(80, -80, 8, dtype="float32"),
    }
    expected = xarray.Dataset(
        {name: (dims, values, attrs[name]) for name, values in arrays.items()},
        coords={"time": times, "lat": ("lat", coords["lat"])},
    )
    grid = dc.ProcessGrid(comm, h=comm.size)
    tensors = {name: dc.scatter(torch.from_numpy(values), grid, dims="nhw") for name, values in arrays.items()}
    return {"tensor": tensors, "dims": dims, "coords": coords, "attrs": attrs}, expected


@pytest.mark.parametrize("form", ["zarr", "h5", "nc"])
def test_dimensions_coordinates_and_attributes_are_opened_by_xarray(
    comm: Any, shared_tmp_path: Path, form: str
) -> None:
    given, expected = labelled(comm)
    import xarray

    tensors, path = given.pop("tensor"), shared_tmp_path / f"both.{form}"
    dc.write(tensors, path, **given)
    single = shared_tmp_path / f"one.{form}"
    dc.write(tensors["t2m"], single, "t2m", **{**given, "attrs": given["attrs"]["t2m"]})
    comm.Barrier()
    engine = {} if form == "zarr" else {"engine": "h5netcdf"}
    with xarray.open_dataset(path, decode_times=False, **engine) as found:
        xarray.testing.assert_identical(found.load(), expected)
    with xarray.open_dataset(single, decode_times=False, **engine) as found:
        xarray.testing.assert_identical(found.load(), expected.drop_vars("z"))


def test_dates_are_encoded_as_by_xarray(comm: Any, shared_tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    dates = np.array(["2001-01-01", "2001-01-03", "2001-02-01"], dtype="datetime64[ns]")
    x = dc.scatter(torch.zeros(3, 4), dc.ProcessGrid(comm, n=comm.size), dims="n-")
    dc.write(x, shared_tmp_path / "x.zarr", "x", dims=("time", "c"), coords={"time": dates})
    comm.Barrier()
    # Warnings are errors here: the metadata are consolidated, as xarray expects.
    with xarray.open_zarr(shared_tmp_path / "x.zarr") as found:
        assert np.array_equal(found["time"].values, dates)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"dims": ("a", "b")}, "Give each of the 3 dimensions"),
        ({"dims": ("a", "a", "b")}, "a name of its own"),
        ({"dims": ("a", "b", "x/y")}, "a name of its own"),
        ({"dims": ("a", "b", "values")}, "a tensor has the name of a dimension"),
        ({"coords": {"a": [1, 2, 3]}}, "coords.'a'.: the dimensions .dims. are not named"),
        ({"dims": ("a", "b", "c"), "coords": {"a": [1, 2]}}, "Give 3 numbers or dates"),
        ({"dims": ("a", "b", "c"), "coords": {"a": ["x", "y", "z"]}}, "Give 3 numbers or dates"),
        ({"attrs": {"units": None}}, "attribute 'units' is None"),
        ({"attrs": {"units": []}}, "attribute 'units' is .."),
    ],
)
@pytest.mark.parametrize("form", ["zarr", "h5"])
def test_labels_that_do_not_fit_raise_before_anything_is_written(
    comm: Any, shared_tmp_path: Path, form: str, more: Any, text: str
) -> None:
    x = dc.scatter(torch.zeros(3, 4, 5), dc.ProcessGrid(comm, n=comm.size), dims="n--")
    path = shared_tmp_path / f"x.{form}"
    with pytest.raises(DataError, match=text):
        dc.write(x, path, **more)
    assert not list(shared_tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMATS)
def test_an_unfinished_output_of_several_tensors_is_overwritten(
    comm: Any, shared_tmp_path: Path, form: str, monkeypatch: Any
) -> None:
    needed(form)
    given, expected = labelled(comm)
    path = shared_tmp_path / f"both.{form}"
    with monkeypatch.context() as patched:
        patched.setattr(writing.Output, "finish", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dc.write(path=path, **given)
    dc.write(path=path, **given)
    comm.Barrier()
    for name in ("t2m", "z"):
        assert np.array_equal(values_of(path, comm, name), expected[name].values)


@pytest.mark.parametrize("form", FORMATS)
def test_an_unfinished_output_with_other_coordinates_is_another_one(
    comm: Any, shared_tmp_path: Path, form: str, monkeypatch: Any
) -> None:
    """The reversed coordinate has the same sum."""
    needed(form)
    given, _ = labelled(comm)
    path = shared_tmp_path / f"both.{form}"
    with monkeypatch.context() as patched:
        patched.setattr(writing.Output, "finish", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dc.write(path=path, **given)
    given["coords"] = {**given["coords"], "lat": given["coords"]["lat"][::-1].copy()}
    with pytest.raises(DataError, match=r"already exists|another unfinished output"):
        dc.write(path=path, **given)
