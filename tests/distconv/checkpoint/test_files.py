"""Files of tensors that HDF5 lays out in memory, read by HDF5."""

from __future__ import annotations

import io

import h5py
import numpy as np
import pytest
import torch

from distconv.checkpoint.files import hdf5_image, storage_dtype
from distconv.checkpoint.pieces import copy_piece, full_box
from tests.distconv.layouts import normal

TENSORS = {
    "double": normal(3, 5, seed=0),
    "float": normal(2, 3, 4, 5, seed=2).float(),
    "half": normal(7, seed=3).half(),
    "bfloat16": normal(3, 3, seed=4).bfloat16(),
    "complex": normal(5, seed=5).to(torch.complex64),
    "whether": normal(9, seed=6) > 0,
    "byte": torch.arange(3, dtype=torch.uint8),
    "float8": normal(6, seed=9).to(torch.float8_e4m3fn),
    "step": torch.tensor(7),
    "in/two/folders": normal(2, 2, seed=7),
    "in/none": torch.zeros(3, 0, 2),
    "needs a gradient": torch.nn.Parameter(normal(4, seed=8)),
}


def read(pieces: list[memoryview]) -> dict[str, torch.Tensor]:
    """All datasets of an HDF5 file by name."""
    found = {}
    with h5py.File(io.BytesIO(b"".join(pieces)), "r") as file:
        file.visititems(lambda name, each: found.update({name: each[()]}) if isinstance(each, h5py.Dataset) else None)
    return {name: torch.from_numpy(np.asarray(value)) for name, value in found.items()}


def test_hdf5_reads_each_tensor_bit_for_bit() -> None:
    found = read(hdf5_image(TENSORS))
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype is storage_dtype(tensor.dtype)
        assert torch.equal(found[name], tensor.detach().view(found[name].dtype))


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_there_is_room_for_what_describes_them(count: int) -> None:
    tensors = {"/".join([f"module{i}"] * (i % 7) + [f"{'long' * 40}{i}"]): torch.tensor([i]) for i in range(count)}
    assert {name: int(tensor) for name, tensor in tensors.items()} == {
        name: int(value) for name, value in read(hdf5_image(tensors)).items()
    }


def test_equal_tensors_make_equal_files() -> None:
    assert b"".join(hdf5_image(TENSORS)) == b"".join(hdf5_image(TENSORS))


def test_names_that_hdf5_would_take_for_others_are_kept_apart() -> None:
    names = ["t", "t/850", "t/850/exp_avg", "a//b", "a/b", "a/./b", "/c", "c", "d/", "d%2Fe", "d/e", "d", "x.y", "."]
    given = {name: normal(3, seed=seed) for seed, name in enumerate(names)}
    image = io.BytesIO(b"".join(hdf5_image(given)))
    with h5py.File(image, "r") as file:
        assert len(file["t"]) == 3 and len(file["a/b"]) == 3 and len(file["x.y"]) == 3  # as they are, where they can be
        for name, tensor in given.items():
            found = torch.empty_like(tensor)
            copy_piece(file, name, full_box([3]), found, full_box([3]))
            assert torch.equal(found, tensor), name
