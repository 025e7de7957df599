"""One data set in all layouts: the same batches to the last bit, and no more is read than what a box touches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.data import DatasetLayout, Field, Loader, SampleFile, open_source
from distconv.errors import DataError
from tests.distconv.data import stored_samples
from tests.distconv.data.sample_files import common
from tests.distconv.data.stored_samples import LAYOUTS, arrays

pytestmark = pytest.mark.ranks(1, 2, 4)

GRIDS = {1: ["n=1"], 2: ["n=2", "w=2"], 4: ["h=2,w=2", "n=2,h=2"]}
NAMES = {
    "image": DatasetLayout("float32", (None, 3, None, None)),
    "label": DatasetLayout("uint8", (None, None, None)),
}
FIELDS = (Field("image", "nchw", shift=np.ones(3), scale=np.full(3, 2.0)), Field("label", "nhw", torch.int64))


def made(comm: Any, folder: Path, layout: str) -> Any:
    path = stored_samples.write(folder / layout, layout) if comm.rank == 0 else None
    return comm.bcast(path)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_are_those_of_the_arrays_to_the_last_bit(comm: Any, shared_tmp_path: Path, layout: str) -> None:
    source = open_source(made(comm, shared_tmp_path, layout), NAMES, comm, one_each=layout == "hdf5-one-each")
    whole = arrays()
    for text in GRIDS[comm.size]:
        loader = Loader(
            source, FIELDS, dc.ProcessGrid(comm, **dc.parse_grid(text)), 2, seed=5, mirror="w", crop={"h": 11, "w": 13}
        )
        seen = []
        for start in (0, 2):  # from the begin, and as after a resume
            for batch in loader.epoch(1, start):
                image, label = (dc.gather(tensor).numpy() for tensor in batch.tensors)
                for row, sample in enumerate(batch.samples):
                    begins = loader.crop_offsets(1, sample)
                    window = (slice(begins["h"], begins["h"] + 11), slice(begins["w"], begins["w"] + 13))
                    step = -1 if loader.mirrored_axes(1, sample) else 1
                    expected = (whole["image"][sample][(slice(None), *window)][..., ::step] - np.float32(1)) / 2
                    assert np.array_equal(image[row], expected.astype(np.float32))
                    assert np.array_equal(label[row], whole["label"][sample][window][:, ::step])
                seen += batch.samples
        assert sorted(seen[:7]) == list(range(7)) and seen[4:7] == seen[7:]
    source.check_unchanged()
    source.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["zarr-v3", "hdf5-list"])
def test_reading_processes_give_the_same(comm: Any, shared_tmp_path: Path, layout: str) -> None:
    path = made(comm, shared_tmp_path, layout)
    whole = arrays()
    with open_source(path, ["image", "label"], comm, readers=3) as source:
        loader = Loader(source, FIELDS[1:], dc.ProcessGrid(comm, h=2), 2, seed=5, ahead=3)
        found = [(batch.samples, dc.gather(batch.tensors[0]).numpy()) for batch in loader.epoch(0)]
    assert len(found) == 4
    for samples, label in found:
        assert np.array_equal(label, whole["label"][list(samples)])


def refused(path: Any, comm: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_source(path, ["image", "label"], comm, **options)
    return common(comm, caught.value)


def test_what_is_no_data_is_refused_on_all_ranks(comm: Any, shared_tmp_path: Path) -> None:
    assert "the list of files is empty" in refused([], comm)
    assert "no file matches the pattern" in refused(f"{shared_tmp_path}/none*.h5", comm)
    if comm.rank == 0:
        (shared_tmp_path / "empty").mkdir()
    comm.Barrier()
    assert "is a folder without a zarr group, .npy, HDF5 or NIfTI files" in refused(shared_tmp_path / "empty", comm)
    assert "No such file" in refused(shared_tmp_path / "missing.nc", comm)


def test_a_file_of_a_list_that_differs_is_named(comm: Any, shared_tmp_path: Path) -> None:
    made(comm, shared_tmp_path, "hdf5-list")
    files = [shared_tmp_path / "hdf5-list" / f"part{index}.h5" for index in range(3)]
    if comm.rank == 0:
        with h5py.File(files[1], "a") as file:
            del file["label"]
            file["label"] = np.zeros((1, 24, 21), np.uint8)
    comm.Barrier()
    text = refused(files, comm)
    assert "part1.h5: dataset 'label' has samples of uint8 (24, 21)" in text and "are uint8 (24, 20)" in text


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["hdf5", "hdf5-list", "virtual", "netcdf", "zarr-v2", "zarr-v3"])
def test_a_rank_reads_the_chunks_that_its_box_touches_and_no_others(
    comm: Any, shared_tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_samples, "HEIGHT", 256)
    monkeypatch.setattr(stored_samples, "WIDTH", 256)
    monkeypatch.setattr(stored_samples, "TILE", (1, 3, 64, 64))
    source = open_source(made(comm, shared_tmp_path, layout), ["image"], comm)
    dist = dc.Distribution(dc.ProcessGrid(comm, h=2, w=2), "nchw")
    _, channels, rows, columns = dist.box(None, (1, 3, 256, 256))
    chunk = 3 * 64 * 64 * 4
    source.read("image", (dc.Interval(0, 1), channels, rows, columns))  # zarr imports modules at its first read
    for sample in (2, 5):
        before = read_bytes()
        got = source.read("image", (dc.Interval(sample, sample + 1), channels, rows, columns))
        read = read_bytes() - before
        assert np.array_equal(got[0], arrays()["image"][sample][:, slice(*rows), slice(*columns)])
        # zarr compresses; HDF5 reads what it has noted about chunks, too, which is less than one of them.
        touched = 4 * chunk
        assert read <= touched + (chunk // 2 if "zarr" not in layout else 0), (read, touched)
        assert read > 0.8 * touched
    source.close()


def test_a_sample_file_of_virtual_datasets_notices_a_change_of_its_sources(comm: Any, shared_tmp_path: Path) -> None:
    with SampleFile(made(comm, shared_tmp_path, "virtual"), ["image"], comm) as file:
        file.check_unchanged()
        comm.Barrier()
        if comm.rank == 0:
            os.utime(shared_tmp_path / "virtual" / "part1.h5", ns=(1, 1))
        comm.Barrier()
        with pytest.raises(DataError, match=r"part1.h5 has been written to since it was opened"):
            file.check_unchanged()


def arrays_of(path: Any, name: str = "x", **options: Any) -> Any:
    with open_source(path, [name], MPI.COMM_SELF, **options) as source:
        return source.read(name, tuple(dc.Interval(0, extent) for extent in source.shape(name)))


VALUES = np.arange(60).reshape(5, 3, 4)


def write_parts(folder: Path, form: str, count: int = 3) -> list[Path]:
    """Write files that hold ``VALUES``, ``VALUES + 1`` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"part{index}.{form}" for index in range(count)]
    for index, path in enumerate(paths):
        if form == "h5":
            with h5py.File(path, "w") as file:
                file["x"] = VALUES + index
        else:
            zarr = pytest.importorskip("zarr")
            zarr.open_group(path, mode="w").create_array("x", data=VALUES + index)
    return paths


ALL = np.concatenate([VALUES, VALUES + 1, VALUES + 2])


@pytest.mark.long
@pytest.mark.ranks(1)
@pytest.mark.parametrize(("form", "readers"), [("h5", 2), ("zarr", 1)])
def test_a_relative_path_stays_what_it_was_when_the_process_changes_its_folder(
    tmp_path: Path, form: str, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(tmp_path / "parts", form)
    for path, expected in ((f"parts/part1.{form}", VALUES + 1), (f"parts/*.{form}", ALL)):
        monkeypatch.chdir(tmp_path)
        source = open_source(path, ["x"], MPI.COMM_SELF, readers=readers)
        monkeypatch.chdir("/")
        found = source.read("x", tuple(dc.Interval(0, extent) for extent in source.shape("x")))
        source.check_unchanged()
        source.close()
        assert np.array_equal(found, expected)


@pytest.mark.ranks(1)
def test_a_list_may_be_of_zarr_groups(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, "zarr")
    assert np.array_equal(arrays_of(paths), ALL)
    assert np.array_equal(arrays_of([*write_parts(tmp_path, "h5")[:2], paths[2]]), ALL)
    assert np.array_equal(arrays_of(paths, one_each=True), ALL.reshape(3, 5, 3, 4))
    source = open_source(paths, ["x"], MPI.COMM_SELF)
    os.utime(paths[1] / "zarr.json", ns=(1, 1))
    with pytest.raises(DataError, match=r"part1.zarr/zarr.json has been written to since it was opened"):
        source.check_unchanged()


@pytest.mark.ranks(1)
def test_a_folder_that_exists_is_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(tmp_path / "exp[1]" / "run*", "h5")
    write_parts(tmp_path / "exp1" / "run2", "h5", 1)
    assert np.array_equal(arrays_of(f"{tmp_path}/exp[1]/run*/*.h5"), ALL)
    assert np.array_equal(arrays_of(f"{tmp_path}/exp[1]/run*/part[12].h5"), ALL[5:])
    assert np.array_equal(arrays_of(f"{tmp_path}/exp[1]/run*"), ALL)
    assert np.array_equal(arrays_of(f"{tmp_path}/exp[1]/run*/part0.h5"), VALUES)
    assert np.array_equal(arrays_of(f"{tmp_path}/exp1/**/*.h5"), VALUES)
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(arrays_of("exp[1]/run*/*.h5"), ALL)
    assert np.array_equal(arrays_of("exp?/run2/*.h5"), VALUES)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_names_need_not_be_utf8(comm: Any, shared_tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(shared_tmp_path) + b"/caf\xe9"))
    if comm.rank == 0:
        write_parts(folder, "h5")
    comm.Barrier()
    for path in (folder, f"{folder}/part*.h5", sorted(folder.iterdir())):
        for readers in (1, 2):
            with open_source(path, ["x"], comm, readers=readers) as source:
                assert np.array_equal(source.read("x", tuple(dc.Interval(0, e) for e in ALL.shape)), ALL)
    with pytest.raises(DataError, match="No such file") as caught:
        open_source(folder / "none.h5", ["x"], comm)
    common(comm, caught.value)


@pytest.mark.ranks(1)
def test_links_of_a_list_are_followed(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for path in write_parts(tmp_path / "parts", "h5"):
        (tmp_path / "links" / path.name).symlink_to(path)
    with pytest.raises(DataError, match="or name the files in a list, where links are followed"):
        arrays_of(f"{tmp_path}/links/*.h5")
    assert np.array_equal(arrays_of(sorted((tmp_path / "links").iterdir())), ALL)
    (tmp_path / "parts" / "part0.h5").rename(tmp_path / "parts" / "part3.h5")
    (tmp_path / "parts" / "part0.h5").symlink_to("part3.h5")
    assert np.array_equal(arrays_of(f"{tmp_path}/parts/part[0-2].h5"), ALL)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (b"CDF\x01", "a classic netCDF 3 file, which has no chunks. Convert it to netCDF 4: nccopy -k nc4"),
        (b"CDF\x05", "a classic netCDF 3 file"),
        (b"\x0e\x03\x13\x01", "an HDF4 file, not HDF5"),
        (b"PK\x03\x04", "a zip archive"),
    ],
)
def test_a_file_of_another_format_is_named(tmp_path: Path, begin: bytes, reason: str) -> None:
    (tmp_path / "a").write_bytes(begin + bytes(100))
    with pytest.raises(DataError, match=reason):
        arrays_of(tmp_path / "a")


@pytest.mark.ranks(1)
def test_the_content_of_a_file_decides_not_its_name(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", VALUES)
    (tmp_path / "x.npy").rename(tmp_path / "x.h5")
    assert np.array_equal(arrays_of(tmp_path / "x.h5"), VALUES)
    (part,) = write_parts(tmp_path / "h5", "h5", 1)
    assert np.array_equal(arrays_of(part.rename(tmp_path / "y.npy")), VALUES)


@pytest.mark.ranks(1)
def test_one_name_is_one_dataset_and_none_is_refused(tmp_path: Path) -> None:
    (path,) = write_parts(tmp_path, "h5", 1)
    with open_source(path, "x", MPI.COMM_SELF) as source:
        assert source.shape("x") == VALUES.shape
    with pytest.raises(DataError, match=r"no datasets of .* are named"):
        open_source(path, [], MPI.COMM_SELF)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("form", ["h5", "npy", "zarr"])
def test_values_have_the_byte_order_of_the_machine(tmp_path: Path, form: str) -> None:
    swapped = VALUES.astype(VALUES.dtype.newbyteorder())
    if form == "h5":
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["x"] = swapped
    elif form == "npy":
        np.save(tmp_path / "x.npy", swapped)
    else:
        zarr = pytest.importorskip("zarr")
        zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2).create_array("x", data=swapped)
    (path,) = tmp_path.iterdir()
    with open_source(path, {"x": DatasetLayout("int64", (None, 3, 4))}, MPI.COMM_SELF) as source:
        found = source.read("x", tuple(dc.Interval(0, extent) for extent in VALUES.shape))
    assert found.dtype.isnative and np.array_equal(found, VALUES)
