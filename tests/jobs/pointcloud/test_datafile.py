"""Files of clouds are written whole or not at all, by any number of ranks with the same content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from distconv.communication.agreement import try_on_rank_0
from distconv.errors import DataError, DistconvError, MismatchError
from distconv.jobs.pointcloud.clouds import Cloud
from distconv.jobs.pointcloud.datafile import made_from, write_clouds
from distconv.jobs.pointcloud.shapes import PART_NAMES, SHAPES, Shapes

GROUPS = {"train": Shapes(37, 50), "test": Shapes(3, 50, group=1)}


class Broken(Shapes):
    """Shapes of which one cannot be made."""

    def __getitem__(self, index: int) -> Cloud:
        if index == 20:
            raise DataError("mesh 20 is broken")
        return super().__getitem__(index)


def test_the_content_is_the_same_on_any_number_of_ranks(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "new" / "clouds.h5"
    assert write_clouds(path, GROUPS, comm, source="shapes")
    with h5py.File(path, "r", locking=False) as file:
        assert (list(file.attrs["class_names"]), list(file.attrs["part_names"])) == (list(SHAPES), list(PART_NAMES))
        for name, shapes in GROUPS.items():
            assert np.array_equal(file[f"{name}/label"], shapes.labels)
            for index in range(len(shapes.labels)):
                cloud = shapes[index]
                assert np.array_equal(file[f"{name}/points"][index], cloud.points)
                assert cloud.part is not None and np.array_equal(file[f"{name}/part"][index], cloud.part)
    assert [each.name for each in path.parent.iterdir()] == ["clouds.h5"]


@pytest.mark.ranks(1, 2)
def test_a_file_from_the_same_source_is_left_and_another_is_not_overwritten(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "clouds.h5"
    assert write_clouds(path, GROUPS, comm, source="these")
    before = path.stat().st_mtime_ns
    assert not write_clouds(path, GROUPS, comm, source="these")
    with pytest.raises(DataError, match=r"clouds\.h5: made from these, not from those. Remove it"):
        write_clouds(path, GROUPS, comm, source="those")
    assert path.stat().st_mtime_ns == before
    assert write_clouds(path, GROUPS, comm, source="those", replace=True)
    assert made_from(path) == "those"


@pytest.mark.ranks(1, 2)
def test_a_file_of_another_kind_is_not_overwritten(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "letter.h5"
    try_on_rank_0(comm, lambda: path.write_text("dear reader"), DistconvError)
    with pytest.raises(DataError, match="made from other data"):
        write_clouds(path, GROUPS, comm, source="shapes")
    assert path.read_text() == "dear reader"


@pytest.mark.ranks(1, 2, 3)
def test_a_cloud_that_cannot_be_made_ends_all_ranks_and_leaves_nothing(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "clouds.h5"
    with pytest.raises(DataError, match="mesh 20 is broken"):
        write_clouds(path, {"train": Broken(30, 40)}, comm, source="shapes")
    assert list(shared_tmp_path.iterdir()) == []


@pytest.mark.ranks(2)
def test_ranks_that_write_different_files_are_told(comm: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="point clouds to write"):
        write_clouds(shared_tmp_path / f"{comm.rank}.h5", GROUPS, comm, source="shapes")
