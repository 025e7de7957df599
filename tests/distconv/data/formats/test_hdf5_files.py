"""Lists of HDF5 files: boxes across their borders, few files open, and a file that changes while it is not open."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from distconv.data.formats import hdf5_files
from distconv.data.formats.hdf5_files import ConcatenatedFiles, Hdf5File, read_file_metadata
from distconv.errors import DataError
from tests.distconv.data import stored_samples
from tests.distconv.data.stored_samples import SAMPLES, arrays


def listed(folder: Path, names: Any = ("image", "label")) -> ConcatenatedFiles:
    files = stored_samples.write(folder, "hdf5-list")
    return ConcatenatedFiles(folder, names, [read_file_metadata(path, names, False) for path in files], False)


def test_boxes_across_files(tmp_path: Path) -> None:
    store = listed(tmp_path / "list")
    whole = arrays()["label"]
    for start in range(SAMPLES):
        for stop in range(start, SAMPLES + 1):
            box = (slice(start, stop), slice(3, 20), slice(0, 7))
            assert np.array_equal(store.read("label", box), whole[box])


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5_files, "_MAX_OPEN_FILES", 2)
    store = pickle.loads(pickle.dumps(listed(tmp_path / "list")))
    for sample in (0, 3, 5, 0, 6):
        box = (slice(sample, sample + 1), slice(0, 24), slice(0, 20))
        assert np.array_equal(store.read("label", box), arrays()["label"][box])
        assert len(store._open) <= 2
    store.close()
    assert not store._open


def test_a_file_that_changed_before_it_was_read_is_found(tmp_path: Path) -> None:
    store = listed(tmp_path / "list")
    with h5py.File(tmp_path / "list" / "part1.h5", "a") as file:
        file["label"][...] = 0
        file["more"] = np.zeros(5000)
    store.read("label", (slice(0, 3), slice(0, 24), slice(0, 20)))
    with pytest.raises(DataError, match=r"part1.h5 has been changed from \d+ to \d+ bytes since it was opened"):
        store.read("label", (slice(3, 4), slice(0, 24), slice(0, 20)))


def test_a_file_whose_datasets_have_different_numbers_is_named(tmp_path: Path) -> None:
    listed(tmp_path / "list")
    with h5py.File(tmp_path / "list" / "part0.h5", "a") as file:
        del file["label"]
        file["label"] = arrays()["label"][:2]
    heads = [read_file_metadata(path, ["image", "label"], False) for path in sorted((tmp_path / "list").iterdir())]
    with pytest.raises(DataError, match=r"part0.h5: the numbers of samples differ: 3 in 'image', 2 in 'label'"):
        ConcatenatedFiles(tmp_path, ["image", "label"], heads, False)


def test_columns_and_attributes_of_one_file(tmp_path: Path) -> None:
    path = stored_samples.write(tmp_path / "one", "hdf5")
    with h5py.File(path, "a") as file:
        file["family"] = ["blast"] * SAMPLES
        file.attrs["threshold"] = 0.4
    store = Hdf5File(path, ["image"])
    assert store.column("family") == ["blast"] * SAMPLES and store.column("image") is None
    assert store.attribute("threshold", "/") == 0.4 and store.attribute("none", "/") is None
    assert store.stored["image"].chunks == stored_samples.TILE
    store.close()


VALUES = np.arange(60).reshape(5, 3, 4)
CHUNKS = (1, 3, 4)


def nbit(file: h5py.File, values: Any) -> None:
    kind, settings = h5py.h5t.STD_I32LE.copy(), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    kind.set_precision(17)
    settings.set_chunk(CHUNKS)
    settings.set_filter(h5py.h5z.FILTER_NBIT, 0)
    space = h5py.h5s.create_simple(values.shape)
    file["x"] = h5py.Dataset(h5py.h5d.create(file.id, None, kind, space, settings))
    file["x"][:] = values


@pytest.mark.parametrize("zero", [False, True])
def test_filters_that_store_few_bits_are_read(tmp_path: Path, zero: bool) -> None:
    values = np.zeros_like(VALUES) if zero else VALUES
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=CHUNKS, scaleoffset=0)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        nbit(file, values)
    for name in ("a.h5", "b.h5"):
        store = Hdf5File(tmp_path / name, ["x"])
        assert np.array_equal(store.read("x", (slice(0, 5), slice(0, 3), slice(0, 4))), values)
        store.close()


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"fillvalue": 7}])
def test_chunks_that_were_never_written_have_the_fill_value(tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (5, 3, 4), "u1", chunks=CHUNKS, **options)[2] = 1
        file.create_dataset("nothing", (5, 3, 4), "u1", chunks=CHUNKS, **options)
        file.create_dataset("empty", (0, 3, 4), "u1")
    expected = np.full((5, 3, 4), options.get("fillvalue", 0))
    expected[2] = 1
    store = Hdf5File(tmp_path / "a.h5", ["x", "empty"])
    assert np.array_equal(store.read("x", (slice(0, 5), slice(0, 3), slice(0, 4))), expected)
    store.close()
    with pytest.raises(DataError, match=r"'nothing' is incomplete: .* takes 60 bytes but 0 were written"):
        Hdf5File(tmp_path / "a.h5", ["nothing"])


def test_a_filter_that_is_not_installed_is_named(tmp_path: Path) -> None:
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk(CHUNKS)
    settings.set_filter(32017, h5py.h5z.FLAG_OPTIONAL)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple(VALUES.shape)
        stored = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT64, space, settings)
        stored.write_direct_chunk((0, 0, 0), bytes(96))
    with pytest.raises(DataError, match=r"'x' is stored with the HDF5 filter 'sz' \(number 32017\), which is not inst"):
        Hdf5File(tmp_path / "a.h5", ["x"])


@pytest.mark.parametrize("values", [VALUES + 1j, np.full(5, b"ab"), np.zeros(5, [("a", "f4")])])
def test_what_is_no_real_number_is_refused(tmp_path: Path, values: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = values
    with pytest.raises(DataError, match="samples must be arrays of numbers"):
        Hdf5File(tmp_path / "a.h5", ["x"])
