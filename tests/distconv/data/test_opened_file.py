"""An HDF5 file is read as far as its size bears out what it claims."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from distconv.data.opened_file import (
    SMALL_BYTES,
    file_identity,
    open_dataset,
    open_hdf5,
    read_dataset,
    resolve_internal_link,
)
from distconv.errors import DataError


@pytest.mark.long
@pytest.mark.fault(80)
def test_what_a_few_bytes_claim_to_be_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "claims.h5"
    with h5py.File(path, "w") as file:
        count = 1 << 28
        made = file.create_dataset("zeros", (count,), "f8", chunks=(count // 8,), compression="gzip", shuffle=True)
        packed = zlib.compress(bytes(8 * 1000))
        for chunk in range(8):
            made.id.write_direct_chunk((chunk * count // 8,), packed)
        file.create_dataset("small", data=np.zeros(SMALL_BYTES // 8), chunks=True, compression="gzip")
    with open_hdf5(path)[0] as file:
        with pytest.raises(DataError, match=f"dataset 'zeros' claims {8 * count} bytes, but"):
            read_dataset(file, "zeros", path, path.stat().st_size)
        assert not read_dataset(file, "small", path, path.stat().st_size).any()


def test_a_name_ends_where_links_within_the_file_lead(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train/x"] = [1]
        file["train/again"] = h5py.SoftLink("x")
        file["alias"] = h5py.SoftLink("train")
    with open_hdf5(tmp_path / "a.h5")[0] as file:
        found = {
            name: resolve_internal_link(file, name)
            for name in ("train/x", "alias/again", "/alias/./x", "train/x/y", "no", "")
        }
    assert found == {
        "train/x": "/train/x",
        "alias/again": "/train/x",
        "/alias/./x": "/train/x",
        "train/x/y": None,
        "no": None,
        "": "/",
    }


def test_a_file_that_is_written_to_or_replaced_is_another(tmp_path: Path) -> None:
    path, other = tmp_path / "a.h5", tmp_path / "b.h5"
    for each in (path, other):
        each.write_bytes(b"12345678")
        os.utime(each, ns=(10**18, 10**18))
    before = file_identity(path)
    assert file_identity(path) == before
    os.utime(path, ns=(10**18, 10**18 + 1))
    assert before.change(file_identity(path)) == "written to" and file_identity(path) != before
    path.write_bytes(b"123456789")
    assert before.change(file_identity(path)) == "changed from 8 to 9 bytes"
    other.replace(path)
    assert before.change(file_identity(path)) == "replaced by another file"


def test_all_values_of_a_dataset_are_decoded(tmp_path: Path) -> None:
    pytest.importorskip("xarray")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3, dtype="i2")
        file["x"].attrs["scale_factor"] = 0.5
    with open_hdf5(tmp_path / "a.h5")[0] as file:
        assert read_dataset(file, "x", tmp_path / "a.h5", 10**6).tolist() == [0.0, 0.5, 1.0]


def test_a_dataset_with_more_stored_bytes_than_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.h5"
    with h5py.File(path, "w") as file:
        file["image"] = np.zeros((4, 5), "f4")
    with h5py.File(path) as file:
        assert open_dataset(file, "image", path, 80).shape == (4, 5)
        with pytest.raises(DataError, match="dataset 'image' claims 80 bytes, more than the file's 79"):
            open_dataset(file, "image", path, 79)
