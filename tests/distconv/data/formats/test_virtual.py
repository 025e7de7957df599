"""Virtual datasets: what HDF5 would make fill values of without a word is an error, and so is what lies elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from distconv.data.formats.hdf5_files import Hdf5File
from distconv.errors import DataError

BOX = (slice(0, 4), slice(0, 3))


def make(folder: Path, parts: list[tuple[Any, str, Any]], name: str = "whole.h5") -> Path:
    """A virtual dataset (4, 3) of parts: where, which file, and what of its (2, 3)."""
    folder.mkdir(exist_ok=True)
    for index in range(2):
        with h5py.File(folder / f"{index}.h5", "w") as file:
            file["x"] = np.full((2, 3), float(index))
    layout = h5py.VirtualLayout((4, 3), "f8")
    for place, file_name, of in parts:
        layout[place] = h5py.VirtualSource(file_name, "x", shape=(2, 3))[of]
    with h5py.File(folder / name, "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=7)
    return folder / name


WHOLE = [(slice(0, 2), "0.h5", slice(None)), (slice(2, 4), "1.h5", slice(None))]


def test_sources_in_the_folder_are_read(tmp_path: Path) -> None:
    store = Hdf5File(make(tmp_path / "a", WHOLE), ["x"])
    assert store.read("x", BOX).tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert {path.name for path in store.states} == {"whole.h5", "0.h5", "1.h5"}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (WHOLE[:1], "is incomplete: of its 12 values 6 have a source"),
        ([WHOLE[0], (slice(2, 4), "2.h5", slice(None))], r"needs .*2.h5, which cannot be read: No such file"),
        ([WHOLE[0], (slice(2, 4), "../b/1.h5", slice(None))], r"leads to .*/b/1.h5, out of the folder"),
        ([WHOLE[0], (slice(1, 3), "1.h5", slice(None))], "has values with two sources"),
        ([*WHOLE, (slice(1, 3), "1.h5", slice(None))], "has values with two sources"),
    ],
)
def test_what_is_not_all_there_is_refused(tmp_path: Path, parts: Any, reason: str) -> None:
    make(tmp_path / "b", WHOLE)
    with pytest.raises(DataError, match=reason):
        Hdf5File(make(tmp_path / "a", parts), ["x"])


def test_a_link_to_elsewhere_and_a_virtual_source_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "b", WHOLE)
    path = make(tmp_path / "a", WHOLE)
    make(tmp_path / "a", [(slice(0, 2), "whole.h5", slice(None)), WHOLE[1]], "twice.h5")
    (tmp_path / "a" / "1.h5").unlink()
    (tmp_path / "a" / "1.h5").symlink_to(tmp_path / "b" / "1.h5")
    with pytest.raises(DataError, match="out of the folder"):
        Hdf5File(path, ["x"])
    with pytest.raises(DataError, match="lies in other files"):
        Hdf5File(tmp_path / "a" / "twice.h5", ["x"])
