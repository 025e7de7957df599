"""Point clouds and meshes in files that other libraries have written, and damaged ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distconv.communication.agreement import try_on_rank_0
from distconv.errors import DataError, DistconvError
from distconv.jobs.pointcloud.datasets import PointClouds
from distconv.jobs.pointcloud.off import TriangleMesh
from distconv.jobs.pointcloud.point_files import read_array, read_ply
from distconv.jobs.pointcloud.sampling import chosen_points

POINTS = np.random.default_rng(0).normal(size=(40, 3))
SQUARE = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [2, 2, 2]], np.float64)


def write_ply(path: Path, vertices: Any, faces: Any = None, *, name: str = "vertex_indices", **how: Any) -> None:
    plyfile = pytest.importorskip("plyfile", reason="needs the package plyfile")
    rows = np.array([tuple(row) for row in vertices], dtype=[(axis, "f8") for axis in "xyz"])
    elements = [plyfile.PlyElement.describe(rows, "vertex")]
    if faces is not None:
        lists = np.empty(len(faces), dtype=[(name, "O")])
        lists[name] = [np.array(face, "i4") for face in faces] if len(faces) else lists[name]
        elements.append(plyfile.PlyElement.describe(lists, "face", val_types={name: "i4"}))
    plyfile.PlyData(elements, **how).write(str(path))


@pytest.mark.parametrize(
    "how", [{"text": True}, {"text": False, "byte_order": "<"}, {"text": False, "byte_order": ">"}]
)
def test_a_ply_file_without_faces_is_a_cloud(tmp_path: Path, how: dict[str, Any]) -> None:
    for faces in (None, []):
        write_ply(tmp_path / "cloud.ply", POINTS, faces, **how)
        found = read_ply(tmp_path / "cloud.ply")
        assert isinstance(found, np.ndarray) and found.dtype == np.float64
        np.testing.assert_allclose(found, POINTS, rtol=1e-15)


@pytest.mark.parametrize("name", ["vertex_indices", "vertex_index"])
def test_a_ply_file_with_faces_is_a_mesh(tmp_path: Path, name: str) -> None:
    write_ply(tmp_path / "mesh.ply", SQUARE, [[0, 1, 2, 3], [0, 1, 4]], name=name, text=True)
    found = read_ply(tmp_path / "mesh.ply")
    assert isinstance(found, TriangleMesh) and np.array_equal(found.vertices, SQUARE)
    assert sorted(found.triangles.tolist()) == [[0, 1, 2], [0, 1, 4], [0, 2, 3]]


@pytest.mark.parametrize(
    ("vertices", "faces", "says"),
    [
        (POINTS[:0], None, "there are no points; repair"),
        (np.array([[0, 0, 0], [0, np.nan, 0]]), None, "point 1 of 2 is not finite"),
        (SQUARE, [[0, 1]], "a face has 2 vertices"),
        (SQUARE, [[0, 1, 5]], "a face refers to vertex 5, but there are 5"),
        (SQUARE, [[0, 1, 1]], "the total area of 1 triangles is 0"),
    ],
)
def test_invalid_values_of_a_ply_file_are_named(tmp_path: Path, vertices: Any, faces: Any, says: str) -> None:
    write_ply(tmp_path / "wrong.ply", vertices, faces, text=True)
    with pytest.raises(DataError, match=rf"wrong\.ply: {says}"):
        read_ply(tmp_path / "wrong.ply")


def test_a_damaged_ply_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cloud.ply"
    for how in ({"text": True}, {"text": False}):
        write_ply(path, POINTS, **how)
        whole = path.read_bytes()
        for content in (b"", whole[:60], whole[:-30], b"solid" + whole, whole.replace(b"double", b"dubble")):
            path.write_bytes(content)
            with pytest.raises(DataError, match=r"cloud\.ply: damaged PLY file \(.*\)\. Download it again"):
                read_ply(path)
    with pytest.raises(DataError, match=r"none\.ply cannot be read: No such file"):
        read_ply(tmp_path / "none.ply")
    path.write_bytes(b"ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nproperty float y\nend_header\n1 2\n")
    with pytest.raises(DataError, match="no element 'vertex' with properties x, y and z"):
        read_ply(path)
    path.write_bytes(b"ply\nformat ascii 1.0\nelement corner 1\nproperty float x\nend_header\n1\n")
    with pytest.raises(DataError, match="no element 'vertex'"):
        read_ply(path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plyfile", None)
    with pytest.raises(DataError, match=r"a\.ply: plyfile is not installed\. Run pip install 'distconv\[pointcloud\]'"):
        read_ply(tmp_path / "a.ply")


def test_arrays_are_read_by_name_or_alone(tmp_path: Path) -> None:
    features = np.arange(40.0)[:, None]
    np.save(tmp_path / "a.npy", np.concatenate([POINTS, features], 1))
    np.savez(tmp_path / "b.npz", points=POINTS, normals=-POINTS)
    np.savez_compressed(tmp_path / "c.npz", POINTS)
    np.savez(tmp_path / "d.npz", pos=POINTS.astype(np.float32), label=3)
    np.save(tmp_path / "e.npy", (POINTS * 100).astype(np.int16))
    for name in ("a.npy", "b.npz", "c.npz"):
        assert np.array_equal(read_array(tmp_path / name), POINTS)
    assert np.array_equal(read_array(tmp_path / "d.npz"), POINTS.astype(np.float32))
    assert np.array_equal(read_array(tmp_path / "e.npy"), (POINTS * 100).astype(np.int16))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"a": POINTS, "b": POINTS}, r"arrays \['a', 'b'\]. Name the points 'points'"),
        ({"points": POINTS[:, :2]}, r"an array float64 \(40, 2\) is not a list of points"),
        ({"points": POINTS > 0}, r"an array bool \(40, 3\)"),
        ({"points": POINTS[0]}, r"an array float64 \(3,\) is not"),
        ({"points": POINTS[:0]}, "there are no points"),
        ({"points": POINTS * np.inf}, "point 0 of 40 is not finite"),
        ({}, r"arrays \[\]"),
    ],
)
def test_invalid_arrays_are_named(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=rf"x\.npz: {says}"):
        read_array(tmp_path / "x.npz")


def test_damaged_arrays_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", points=POINTS)
    np.save(tmp_path / "x.npy", POINTS)
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in ("x.npz", "x.npy"):
        whole = (tmp_path / name).read_bytes()
        for content in (b"", whole[:7], whole[:70], whole[:-40]):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(DataError, match=rf"{name}: damaged file of NumPy arrays"):
                read_array(tmp_path / name)
    with pytest.raises(DataError, match=r"pickle\.npy: damaged file"):
        read_array(tmp_path / "pickle.npy")
    with pytest.raises(DataError, match=r"none\.npy cannot be read"):
        read_array(tmp_path / "none.npy")


def test_points_of_a_cloud_are_chosen_once_before_any_again() -> None:
    few = chosen_points(POINTS, 100, 0, 1)
    assert few.shape == (100, 3) and few.dtype == np.float32
    assert np.array_equal(np.unique(few[:40], axis=0), np.unique(POINTS.astype(np.float32), axis=0))
    many = chosen_points(POINTS, 12, 0, 1)
    assert len(np.unique(many, axis=0)) == 12
    assert np.array_equal(chosen_points(POINTS, 12, 0, 1), many) and not np.array_equal(
        chosen_points(POINTS, 12, 0, 2), many
    )


@pytest.mark.ranks(1, 2)
def test_a_folder_may_have_all_kinds_of_files(comm: Any, shared_tmp_path: Path) -> None:
    pytest.importorskip("plyfile", reason="needs the package plyfile")

    def write() -> None:
        for name in ("left", "right"):
            for group in ("train", "test"):
                (shared_tmp_path / name / group).mkdir(parents=True)
        shift = np.array([9.0, 0, 0])
        np.save(shared_tmp_path / "left" / "train" / "a.npy", POINTS - shift)
        write_ply(shared_tmp_path / "left" / "train" / "b.ply", SQUARE - shift, [[0, 1, 2, 3]], text=True)
        np.savez(shared_tmp_path / "right" / "train" / "c.NPZ", points=POINTS + shift)
        write_ply(shared_tmp_path / "right" / "test" / "d.ply", POINTS + shift)

    try_on_rank_0(comm, write, DistconvError)
    clouds = PointClouds(shared_tmp_path, comm, points=50)
    assert clouds.class_names == ("left", "right")
    assert {name: group.labels.tolist() for name, group in clouds.groups.items()} == {"train": [0, 0, 1], "test": [1]}
    for group in clouds.groups.values():
        for index, label in enumerate(group.labels):
            assert group[index].points.shape == (50, 3)
            assert ((group[index].points[:, 0] > 0) == label).all()
    clouds.close()
    damaged = shared_tmp_path / "right" / "train" / "c.NPZ"
    try_on_rank_0(comm, lambda: damaged.write_bytes(b"PK"), DistconvError)
    with pytest.raises(DataError, match=r"c\.NPZ: damaged file of NumPy arrays"):
        PointClouds(shared_tmp_path, comm, points=50)
