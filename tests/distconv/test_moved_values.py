"""Values of every dtype are moved, written and read bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distconv as dc
from distconv.communication.digest import checksum, digest
from distconv.writing import open_output
from tests.distconv.layouts import grid_over, raises_everywhere

VALUES: dict[torch.dtype, list[Any]] = {
    torch.bool: [True, False, True],
    torch.uint8: [0, 200, 255],
    torch.int8: [-128, 0, 127],
    torch.int16: [-(2**15), 0, 2**15 - 1],
    torch.int32: [-(2**31), 0, 2**31 - 1],
    torch.int64: [-(2**63), 2**53 + 1, 2**63 - 1],
    torch.float16: [6e-8, -65504.0, float("inf")],
    torch.bfloat16: [1e-38, -3e38, float("-inf")],
    torch.float32: [1e-45, -0.0, 1 / 3],
    torch.float64: [5e-324, -0.0, 1 / 3],
    torch.complex64: [1 + 2j, -1 / 3j, 1e-45],
    torch.complex128: [1 + 2j, -1 / 3j, 5e-324],
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_values_of_every_dtype_are_moved_bit_for_bit(comm: Any, shared_tmp_path: Any, dtype: torch.dtype) -> None:
    x = torch.tensor(VALUES[dtype] * 5, dtype=dtype).view(5, 3)
    grid = grid_over(comm, n=comm.size)
    given = dc.scatter(x, grid)
    moved = [dc.gather(y) for y in (given, given.redistribute(given.dist.replicate()), dc.scatter(x, grid, root=0))]
    assert all(bits(y) == bits(x) for y in moved)
    model = nn.Module()
    model.register_buffer("x", x.clone())
    dc.save_checkpoint(shared_tmp_path, 1, model, comm=comm)
    model.x.zero_()
    dc.load_checkpoint(shared_tmp_path, model, comm=comm)
    assert bits(model.x) == bits(x)
    wrong = x.clone()
    wrong[-1, 0] = x[0, 1]
    assert digest(wrong) != digest(x) and checksum(wrong) != checksum(x)
    if dtype.is_complex:
        return
    dc.write(given, shared_tmp_path / "x.zarr", "x")
    stored = dc.gather(dc.scatter(torch.from_numpy(read(shared_tmp_path / "x.zarr")), grid))
    assert bits(stored.to(dtype)) == bits(x)


def bits(tensor: torch.Tensor) -> bytes:
    assert not isinstance(tensor, dc.DistTensor)
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() + str(tensor.dtype).encode()


def read(path: Any) -> Any:
    import zarr

    return np.asarray(zarr.open_group(path, mode="r")["x"])


@pytest.mark.ranks(2)
def test_what_no_file_of_samples_holds_is_rejected(comm: Any, shared_tmp_path: Any) -> None:
    for dtype in (torch.complex64, torch.complex128, torch.float8_e5m2):
        raises_everywhere(
            comm,
            dc.DataError,
            f"{dtype} is not a real NumPy dtype",
            lambda dtype=dtype: open_output(shared_tmp_path / "o.zarr", "x", (3,), dtype, comm, note={}),
        )
