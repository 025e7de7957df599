"""Files of point clouds are opened by all ranks, in both formats; what is wrong with one is said on all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from distconv.communication.agreement import try_on_rank_0
from distconv.errors import DataError
from distconv.jobs.pointcloud.datasets import PointClouds
from tests.jobs.pointcloud.cloud_files import write_ours, write_quantised


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("parts", [True, False])
def test_clouds_are_read_as_they_were_written(comm: Any, shared_tmp_path: Path, parts: bool) -> None:
    path = shared_tmp_path / "clouds.h5"
    made = try_on_rank_0(comm, lambda: write_ours(path, parts=parts), DataError)
    clouds = PointClouds(path, comm)
    assert (clouds.class_names, clouds.part_names) == (("a", "b", "c"), ("left", "right") if parts else ())
    for group, count in (("train", 5), ("test", 2)):
        found = clouds.groups[group]
        assert (found.points, found.labels.tolist()) == (30, [i % 3 for i in range(count)])
        for index in reversed(range(count)):
            cloud = found[index]
            assert np.array_equal(cloud.points, made[group]["points"][index])
            assert cloud.label == index % 3
            assert (cloud.part is None) == (not parts)
            assert not parts or np.array_equal(cloud.part, made[group]["part"][index])
    assert str(path) in open_files()
    clouds.close()
    assert str(path) not in open_files()


def open_files() -> set[str]:
    """Return the paths of the files that this process has open."""
    return {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}


@pytest.mark.ranks(1, 2)
def test_quantised_points_are_where_the_format_says(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "q.h5"
    points = try_on_rank_0(comm, lambda: write_quantised(path), DataError)
    clouds = PointClouds(path, comm)
    assert (list(clouds.groups), clouds.class_names) == (["train"], ("x", "y"))
    for index, label in enumerate([0, 1, 1, 0]):
        cloud = clouds.groups["train"][index]
        assert cloud.points.dtype == np.float32
        assert np.abs(cloud.points - points[index]).max() < 1e-6
        assert cloud.label == label
    clouds.close()


def test_classes_without_names_are_numbered_and_doubles_are_read(tmp_path: Path) -> None:
    path = tmp_path / "clouds.h5"
    write_ours(path, parts=False)
    with h5py.File(path, "r+") as file:
        del file.attrs["class_names"]
        values = file["train/points"][()]
        del file["train/points"]
        file["train/points"] = values.astype(np.float64)
        file["test/label"][1] = 4
    clouds = PointClouds(path, MPI.COMM_SELF)
    assert clouds.class_names == ("0", "1", "2", "3", "4")
    assert np.array_equal(clouds.groups["train"][1].points, values[1])
    clouds.close()


@pytest.mark.ranks(1, 2)
def test_a_file_that_is_replaced_between_epochs_is_noticed_on_all_ranks(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "clouds.h5"
    try_on_rank_0(comm, lambda: write_ours(path), DataError)
    clouds = PointClouds(path, comm)
    clouds.check_unchanged()
    try_on_rank_0(comm, lambda: write_quantised(path.with_name("other.h5")), DataError)
    try_on_rank_0(comm, lambda: path.with_name("other.h5").replace(path), DataError)
    with pytest.raises(DataError, match=r"clouds\.h5 has been replaced by another file since it was opened"):
        clouds.check_unchanged()
    clouds.close()


def changed(**values: Any) -> Callable[[Path], object]:
    return lambda path: write_ours(path, **values)


def emptied(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["other"] = [1]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_text("no HDF5"), "cannot be opened as HDF5"),
        (emptied, "there is no dataset 'train/.*' in it; at its top are other"),
        (
            changed(points=np.zeros((5, 30, 2), np.float32)),
            r"'train/points' is float32 \(5, 30, 2\) but must be floats",
        ),
        (changed(points=np.zeros((5, 30, 3), np.int32)), r"is int32 \(5, 30, 3\) but must be floats \(any, any, 3\)"),
        (changed(points=np.zeros((4, 30, 3), np.float32)), "the numbers of samples differ"),
        (
            changed(points=np.zeros((5, 0, 3), np.float32), part=np.zeros((5, 0), np.uint8)),
            "5 clouds of 0 points. Use",
        ),
        (changed(label=np.zeros(5, np.float32)), r"'train/label' is float32 \(5,\) but must be whole numbers \(any\)"),
        (
            changed(label=np.array([0, 1, 3, 0, 0])),
            r"'train': cloud 2: its class is 3, but there are 3 classes \(a, b, c\)",
        ),
        (changed(label=np.array([0, -1, 0, 0, 0])), "cloud 1: its class is -1"),
        (changed(part=np.zeros((5, 29), np.uint8)), "a cloud has 30 points but 29 part labels"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused_on_all_ranks(
    comm: Any, shared_tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    path = shared_tmp_path / "clouds.h5"
    try_on_rank_0(comm, lambda: bool(make(path)), DataError)
    with pytest.raises(DataError, match=message):
        PointClouds(path, comm)
    comm.Barrier()


def test_a_cloud_with_points_that_are_nowhere_or_of_no_part_is_named(tmp_path: Path) -> None:
    points, part = np.zeros((5, 30, 3), np.float32), np.zeros((5, 30), np.uint8)
    points[3, 7, 1] = np.nan
    part[1, 2] = 2
    write_ours(tmp_path / "clouds.h5", points=points, part=part)
    clouds = PointClouds(tmp_path / "clouds.h5", MPI.COMM_SELF)
    with pytest.raises(
        DataError, match=r"'train': cloud 3: point 7 is not finite \(\[.* nan .*\]; 1 such points of 30\)"
    ):
        clouds.groups["train"][3]
    with pytest.raises(DataError, match="cloud 1: its parts are 0 to 2, but the attribute 'part_names' has 2 names"):
        clouds.groups["train"][1]
    with pytest.raises(IndexError):
        clouds.groups["train"][5]
    assert clouds.groups["train"][-1].label == 1
    clouds.close()
