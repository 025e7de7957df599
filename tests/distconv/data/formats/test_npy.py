"""NumPy's files: a name is a file in the folder, no objects of Python, nothing elsewhere, nothing cut short."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from distconv.data.formats.npy import NpyFiles, has_npy_files
from distconv.errors import DataError
from tests.distconv.data import stored_samples
from tests.distconv.data.stored_samples import arrays


def test_a_file_is_a_dataset(tmp_path: Path) -> None:
    folder = stored_samples.write(tmp_path / "npy", "npy")
    box = (slice(2, 4), slice(0, 3), slice(5, 9), slice(1, 20))
    assert np.array_equal(NpyFiles(folder, ["image"]).read("image", box), arrays()["image"][box])
    assert np.array_equal(NpyFiles(folder / "image.npy", ["image"]).read("image", box), arrays()["image"][box])
    with pytest.raises(DataError, match="there is no dataset 'label' in it; it is 'image'"):
        NpyFiles(folder / "image.npy", ["label"])
    with pytest.raises(DataError, match=r"dataset 'none' needs .*none.npy, which cannot be read"):
        NpyFiles(folder, ["none"])


def test_values_in_fortrans_order_are_those_of_their_indices(tmp_path: Path) -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    np.save(tmp_path / "x.npy", np.asfortranarray(values))
    box = (slice(1, 2), slice(0, 2), slice(1, 4))
    assert np.array_equal(NpyFiles(tmp_path, ["x"]).read("x", box), values[box])


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    np.save(tmp_path / "objects.npy", np.array([Bomb(), None]), allow_pickle=True)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Bomb()))
    for name in ("objects", "pickle"):
        with pytest.raises(DataError, match="cannot be mapped as an array of NumPy"):
            NpyFiles(tmp_path, [name])
    assert not (tmp_path / "exploded").exists()


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((100, 100)))
    os.truncate(tmp_path / "x.npy", 50_000)
    with pytest.raises(DataError, match="cannot be mapped"):
        NpyFiles(tmp_path, ["x"])


def test_a_name_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "folder" / "y.npy").symlink_to("../x.npy")
    for name in ("../x", "y"):
        with pytest.raises(DataError, match="out of the folder"):
            NpyFiles(tmp_path / "folder", [name])


def test_a_column_is_a_file_beside_the_samples(tmp_path: Path) -> None:
    for name, values in {"x": np.zeros((2, 3)), "family": np.array(["a", "b"]), "pairs": np.zeros((2, 2))}.items():
        np.save(tmp_path / f"{name}.npy", values)
    store = NpyFiles(tmp_path, ["x"])
    assert [store.column(name) for name in ("family", "pairs", "none")] == [["a", "b"], None, None]
    assert has_npy_files(tmp_path) and has_npy_files(tmp_path / "x.npy") and not has_npy_files(tmp_path / "none")
