"""A folder of meshes is sampled once into a file, and again when a mesh has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from distconv.communication.agreement import try_on_rank_0
from distconv.errors import DataError, DistconvError
from distconv.jobs.pointcloud.datasets import PointClouds
from distconv.jobs.pointcloud.folders import cached_file, convert, find_clouds
from tests.jobs.pointcloud.cloud_files import write_modelnet


@pytest.fixture
def folder(comm: Any, shared_tmp_path: Path) -> Path:
    try_on_rank_0(comm, lambda: write_modelnet(shared_tmp_path / "meshes", train=2, test=1), DistconvError)
    return shared_tmp_path / "meshes"


@pytest.mark.ranks(1, 2, 3)
def test_a_folder_opens_as_its_classes_and_points(comm: Any, folder: Path) -> None:
    clouds = PointClouds(folder, comm, points=200)
    assert clouds.class_names == ("box", "plank")
    assert (clouds.groups["train"].labels.tolist(), clouds.groups["test"].labels.tolist()) == ([0, 0, 1, 1], [0, 1])
    for group in clouds.groups.values():
        for index, label in enumerate(group.labels):
            cloud = group[index]
            assert (cloud.label, cloud.part) == (label, None)
            low, high = cloud.points.min(0), cloud.points.max(0)
            assert (low >= 0).all() and (low < 0.2).all() and (high > 0.8).all()
            assert (high[0] > 1.5) == (label == 1)  # a corner of a plank is drawn out to 5
    clouds.close()


@pytest.mark.ranks(1, 2)
def test_the_file_is_made_once_and_again_when_a_mesh_has_changed(comm: Any, folder: Path) -> None:
    path = cached_file(folder, comm, 50)
    before = path.read_bytes()
    assert cached_file(folder, comm, 50) == path
    assert path.read_bytes() == before
    mesh = folder / "box" / "train" / "box_0000.off"
    try_on_rank_0(comm, lambda: mesh.write_text(mesh.read_text().replace("1 1 1\n", "1 1 1.5\n")), DistconvError)
    assert cached_file(folder, comm, 50) == path
    assert path.read_bytes() != before
    assert sorted(each.name for each in folder.iterdir()) == ["50_points.h5", "box", "plank"]


@pytest.mark.ranks(1, 2)
def test_a_broken_mesh_is_named_and_no_file_is_left(comm: Any, folder: Path) -> None:
    mesh = folder / "plank" / "train" / "plank_0001.off"
    try_on_rank_0(comm, lambda: mesh.write_text(mesh.read_text()[:-20]), DistconvError)
    with pytest.raises(DataError, match=r"plank_0001\.off: the header announces 8 vertices and 6 faces, but"):
        cached_file(folder, comm, 50)
    assert sorted(each.name for each in folder.iterdir()) == ["box", "plank"]


@pytest.mark.ranks(1, 2)
def test_a_file_elsewhere_is_not_overwritten_by_other_meshes(comm: Any, folder: Path, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "meshes.h5"
    assert convert(folder, path, comm, 20)
    assert not convert(folder, path, comm, 20)
    with pytest.raises(
        DataError, match=r"OFF meshes \(4 train, 2 test\), 20 points each, .* not from .* 30 points each"
    ):
        convert(folder, path, comm, 30)
    with h5py.File(path, "r", locking=False) as file:
        assert file["train/points"].shape == (4, 20, 3)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["empty", "none"])
def test_a_folder_without_meshes_is_refused(comm: Any, shared_tmp_path: Path, name: str) -> None:
    try_on_rank_0(comm, lambda: (shared_tmp_path / "empty" / "class" / "train").mkdir(parents=True), DistconvError)
    message = "no training clouds found. Store files as CLASS/train" if name == "empty" else "No such file"
    with pytest.raises(DataError, match=message):
        cached_file(shared_tmp_path / name, comm)


def test_meshes_need_no_test_group_and_may_be_named_in_capitals(tmp_path: Path) -> None:
    write_modelnet(tmp_path, train=1, test=0)
    mesh = tmp_path / "box" / "train" / "box_0000.off"
    mesh.rename(mesh.with_suffix(".OFF"))
    found = find_clouds(tmp_path, 10)
    assert list(found) == ["train"]
    assert found["train"].labels.tolist() == [0, 1]
    assert np.array_equal(found["train"][0].points, found["train"][0].points)


def test_meshes_come_by_class_and_name(tmp_path: Path) -> None:
    write_modelnet(tmp_path, train=3, test=1)
    found = find_clouds(tmp_path, 10)["train"]
    assert [path.stem for path in found.paths] == [f"{name}_{n:04}" for name in ("box", "plank") for n in range(3)]
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
