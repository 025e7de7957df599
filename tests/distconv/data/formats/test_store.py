"""Behaviour of all formats: empty index ranges, damaged data, copies in other processes, and locations of values."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distconv.data.formats.npy import NpyFiles
from distconv.data.formats.store import FunctionStore, check_inside, check_numeric
from distconv.errors import DataError
from tests.distconv.data import stored_samples
from tests.distconv.data.stored_samples import arrays


def test_an_empty_box_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = NpyFiles(stored_samples.write(tmp_path / "npy", "npy"), ["label"])
    monkeypatch.setattr(store, "values", lambda name, box: 1 / 0)
    found = store.read("label", (slice(0, 2), slice(4, 4), slice(0, 20)))
    assert found.shape == (2, 0, 20) and found.dtype == np.uint8
    with pytest.raises(DataError, match=r"cannot read \[0:2, 4:5, 0:20\] of dataset 'label': division by zero"):
        store.read("label", (slice(0, 2), slice(4, 5), slice(0, 20)))
    monkeypatch.setattr(store, "values", lambda name, box: np.zeros((2, 1, 19)))
    with pytest.raises(DataError, match=r"of dataset 'label' has values of \(2, 1, 19\)"):
        store.read("label", (slice(0, 2), slice(4, 5), slice(0, 20)))


def test_a_copy_in_another_process_opens_the_files_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stored_samples.write(tmp_path / "npy", "npy")
    pickled = pickle.dumps(NpyFiles(Path("npy"), ["image"]))
    monkeypatch.chdir("/")
    assert len(pickled) < 1000  # no values
    copy = pickle.loads(pickled)
    assert np.array_equal(copy.read("image", (slice(6, 7), *[slice(0, 3)] * 3)), arrays()["image"][6:7, :, :3, :3])


def test_a_function_must_give_what_it_is_asked_for() -> None:
    box = (slice(1, 2), slice(0, 3))

    def fails(name: str, box: Any) -> Any:
        raise KeyError(name)

    assert FunctionStore(Path("ones"), lambda name, box: np.ones((1, 3))).read("x", box).all()
    with pytest.raises(DataError, match=r"ones gives \(1, 2\) for \[1:2, 0:3\] of 'x'"):
        FunctionStore(Path("ones"), lambda name, box: np.ones((1, 2))).read("x", box)
    with pytest.raises(DataError, match=r"fails: 'x' of \[1:2, 0:3\]: KeyError: 'x'"):
        FunctionStore(Path("fails"), fails).read("x", box)


def test_only_arrays_of_numbers_are_samples() -> None:
    check_numeric(Path("a"), "x", (1, 2), np.dtype("f4"))
    for shape, dtype in (((), "f4"), ((2,), "O"), ((2,), "U3")):
        with pytest.raises(DataError, match="samples must be arrays of numbers"):
            check_numeric(Path("a"), "x", shape, np.dtype(dtype))


def test_what_links_place_elsewhere_is_not_inside(tmp_path: Path) -> None:
    folder, other = tmp_path / "a", tmp_path / "ab"
    folder.mkdir(), other.mkdir()
    (other / "file").touch()
    (folder / "file").touch()
    (folder / "good").symlink_to("file")
    (folder / "bad").symlink_to(other / "file")
    (folder / "way").symlink_to(other)
    os.mkfifo(folder / "pipe")
    check_inside(folder / "good", folder, "x")
    for name, reason in {
        "bad": "out of the folder",
        "way/file": "out of the folder",
        "../ab/file": "out of the folder",
        "none": "cannot be read: No such file",
        "pipe": "not a regular file",
    }.items():
        with pytest.raises(DataError, match=reason):
            check_inside(folder / name, folder, "x")
