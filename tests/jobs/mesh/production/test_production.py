"""Runs on all ranks: the same file on any number of them, and a stream that gives nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.dataset import generate
from distconv.jobs.mesh.production import production
from distconv.jobs.mesh.production.parts import RunFolder, streams
from distconv.jobs.mesh.production.run import Criteria
from tests.jobs.mesh.mesh_files import SIZE

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def content(path: Path) -> dict[str, Any]:
    """All datasets and attributes of a file by name."""
    found: dict[str, Any] = {}
    with h5py.File(path, "r") as file:
        found |= {f"@{key}": str(value) for key, value in file.attrs.items()}

        def visit(name: str, thing: h5py.Group | h5py.Dataset) -> None:
            found.update({f"{name}@{key}": value for key, value in thing.attrs.items()})
            if isinstance(thing, h5py.Dataset):
                found[name] = thing[...]

        file.visititems(visit)
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.long
@pytest.mark.ranks(3)
def test_any_number_of_ranks_makes_the_same_file(comm: Any, shared_tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"size": SIZE, "samples": 4, "heldout": 2, "seed": 3, "progress": False}
    together = generate(shared_tmp_path / "together.h5", comm=comm, **arguments)
    alone = generate(shared_tmp_path / f"alone-{comm.rank}.h5", **arguments)
    assert together.samples == alone.samples == 4
    assert_same(content(shared_tmp_path / "together.h5"), content(shared_tmp_path / f"alone-{comm.rank}.h5"))


def test_a_stream_that_gives_nothing_ends_with_an_error(tmp_path: Path) -> None:
    parts = RunFolder(tmp_path, "x", per_run=2, most_runs=2)
    criteria = Criteria(least_labelled=1.1, last_time=0.1)
    with pytest.raises(DataError, match="2 simulations of 'taylor-green' gave 0 of 1 samples"):
        production.produce(parts, streams(1, 0), size=16, seed=0, criteria=criteria, comm=None, progress=False)
