"""Readers given a damaged file, or something else at its path, raise one error with the path on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.data.opening import open_source
from distconv.parameters.weight_files import read_weights
from tests.distconv.damaged_files import STATES, check_rejected
from tests.distconv.layouts import raises_everywhere

pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.time_limit(20)]

READERS: dict[str, tuple[str, Callable[[Path, Any], object]]] = {
    "weights of torch": ("w.pt", read_weights),
    "weights of safetensors": ("w.safetensors", read_weights),
    "HDF5": ("a.h5", lambda path, comm: open_source(path, ["x"], comm)),
    "netCDF": ("a.nc", lambda path, comm: open_source(path, ["x"], comm)),
    "NumPy": ("a.npy", lambda path, comm: open_source(path, ["a"], comm)),
    "zarr": ("a.zarr", lambda path, comm: open_source(path, ["x"], comm)),
    "NIfTI": ("a.nii", lambda path, comm: open_source(path, ["image"], comm)),
    "compressed NIfTI": ("a.nii.gz", lambda path, comm: open_source(path, ["image"], comm)),
    "list": ("a.h5", lambda path, comm: open_source([path, path], ["x"], comm)),
    "plan": ("p.json", dc.Plan.load),
    "checkpoint": ("checkpoints", lambda path, comm: dc.load_checkpoint(path, nn.Linear(2, 2), comm=comm)),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_such_file_is_rejected(comm: Any, shared_tmp_path: Path, reader: str, state: str) -> None:
    name, read = READERS[reader]
    check_rejected(comm, shared_tmp_path / name, state, read)


WRITERS: dict[str, Callable[[Path, Any], object]] = {
    "HDF5": lambda path, comm: write(path.with_suffix(".h5"), comm),
    "zarr": lambda path, comm: write(path.with_suffix(".zarr"), comm),
    "trace": lambda path, comm: dc.trace(path, comm).__enter__(),
    "checkpoint": lambda path, comm: dc.save_checkpoint(path, 1, nn.Linear(2, 2), comm=comm),
}


def write(path: Path, comm: Any) -> None:
    dc.write(dc.scatter(torch.ones(4, 3), dc.ProcessGrid(comm, n=comm.size)), path, "x")


@pytest.mark.parametrize("state", ["a file", "a folder that is a file"])
@pytest.mark.parametrize("writer", WRITERS)
def test_where_a_file_stands_nothing_else_is_written(comm: Any, shared_tmp_path: Path, writer: str, state: str) -> None:
    place = shared_tmp_path / "o"
    if comm.rank == 0:
        for each in (place, place.with_suffix(".h5"), place.with_suffix(".zarr")):
            each.write_text("mine")
    comm.Barrier()
    path = place if state == "a file" else place / "below"
    raises_everywhere(comm, dc.DistconvError, "o", lambda: WRITERS[writer](path, comm))
    assert all(each.read_text() == "mine" for each in shared_tmp_path.glob("o*") if each.is_file())
    comm.Barrier()
