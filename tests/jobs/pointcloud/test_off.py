"""Meshes are read from OFF files as people write them; what is wrong with a file is said with its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.pointcloud.off import read_off
from tests.jobs.pointcloud.cloud_files import CUBE, off

TRIANGLE = [(0, 0, 0), (2, 0, 0), (0, 3, 0)]


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "mesh.off"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    "text",
    [
        off(TRIANGLE, [(0, 1, 2)]),
        off(TRIANGLE, [(0, 1, 2)], header="OFF"),
        off(TRIANGLE, [(0, 1, 2)], header="OFF "),
        "# by hand\n\n  OFF # header\n\n3 1 3 # counts\n\n0 0 0\n# between\n2 0 0 # right\n\t0 3.0e0 0\n\n3 0 1 2\n\n",
        off(TRIANGLE, [(0, 1, 2)]).replace("\n", "\r\n"),
        off(TRIANGLE, [(0, 1, 2)]).replace("3 0 1 2", "3 0 1 2 255 0 0"),
    ],
    ids=["plain", "glued header", "counts beside the header", "comments and blanks", "line ends of DOS", "coloured"],
)
def test_a_mesh_is_read_however_it_is_written(tmp_path: Path, text: str) -> None:
    mesh = read_off(written(tmp_path, text))
    assert np.array_equal(mesh.vertices, TRIANGLE)
    assert np.array_equal(mesh.triangles, [(0, 1, 2)])
    assert mesh.areas == pytest.approx([3])


def test_a_face_of_many_vertices_becomes_a_fan_of_the_same_area(tmp_path: Path) -> None:
    angle = np.arange(6) * np.pi / 3
    hexagon = [(float(np.cos(a)), float(np.sin(a)), 1.0) for a in angle]
    mesh = read_off(written(tmp_path, off([*hexagon, (0, 0, 5)], [range(6), (0, 1, 6)])))
    assert np.array_equal(mesh.triangles, [(0, 1, 2), (0, 2, 3), (0, 3, 4), (0, 4, 5), (0, 1, 6)])
    assert mesh.areas[:4].sum() == pytest.approx(1.5 * np.sqrt(3))


def test_squares_and_triangles_may_be_mixed(tmp_path: Path) -> None:
    mesh = read_off(written(tmp_path, "OFF" + CUBE.replace("8 6 12", "8 7 12") + "3 0 1 2\n"))
    assert len(mesh.triangles) == 6 * 2 + 1
    assert mesh.areas.sum() == pytest.approx(6.5)


def test_some_triangles_may_have_no_area(tmp_path: Path) -> None:
    mesh = read_off(written(tmp_path, off(TRIANGLE, [(0, 1, 2), (1, 1, 2)])))
    assert mesh.areas == pytest.approx([3, 0])


GOOD = off(TRIANGLE, [(0, 1, 2)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (b"OFF BINARY\n\xff\xfe", "byte 11 is not text. Use an OFF file in text format"),
        (GOOD.replace("OFF", "PLY"), "line 1: starts with 'PLY', not with 'OFF'"),
        (GOOD.replace("OFF\n", ""), "line 1: starts with '3', not with 'OFF'"),
        ("OFF\n", "line 1: '' are not the numbers of vertices, faces and edges"),
        (GOOD.replace("3 1 0", "3 1"), "line 2: '3 1' are not the numbers"),
        ("OFF-3 1 0\n", "line 1: '-3 1 0' are not the numbers"),
        ("OFF3.5 1 0\n", "line 1: '3.5 1 0' are not the numbers"),
        ("OFFabc 1 0\n", "line 1: starts with 'OFFabc'"),
        (
            GOOD.replace("3 1 0", "999999999999999999 1 0"),
            "999999999999999999 vertices and 1 faces, but 4 lines follow",
        ),
        (GOOD[: GOOD.rindex("3 0")], "announces 3 vertices and 1 faces, but 3 lines follow: the file is truncated"),
        (GOOD + "3 0 1 2\n", "but 5 lines follow: the file is longer than that"),
        (GOOD.replace("2 0 0", "2 0"), "line 4: a vertex needs 3 coordinates, found 2"),
        (GOOD.replace("2 0 0", "2 0 0 1"), "line 4: a vertex needs 3 coordinates, found 4"),
        (GOOD.replace("2 0 0", "2 zero 0"), "line 4: 'zero' is not a valid number"),
        (GOOD.replace("2 0 0", "2 nan 0"), r"line 4: vertex 1 is not finite \(\[ 2. nan  0.\]"),
        (GOOD.replace("3 0 1 2", "3 0 1"), "line 6: the face announces 3 vertices but has 2: truncated"),
        (GOOD.replace("3 0 1 2", "2 0 1"), "line 6: a face needs at least 3 vertices, found '2'"),
        (GOOD.replace("3 0 1 2", "x 0 1 2"), "line 6: a face needs at least 3 vertices, found 'x'"),
        (GOOD.replace("3 0 1 2", "3 0 1.5 2"), "line 6: '1.5' is not a valid index of a vertex"),
        (GOOD.replace("3 0 1 2", f"3 0 {10**30} 2"), "line 6: '1000000000000000000000000000000' is not a valid index"),
        (GOOD.replace("3 0 1 2", "3 0 1 3"), "line 6: the face refers to vertex 3, but there are 3, counted from 0"),
        (GOOD.replace("3 0 1 2", "3 0 -1 2"), "line 6: the face refers to vertex -1"),
        (GOOD.replace("3 0 1 2", "3 0 1 1"), "the total area of 1 triangles is 0"),
        (off(TRIANGLE, []), "the total area of 0 triangles is 0"),
        (off([(0, 0, 0), (1e200, 0, 0), (0, 1e200, 0)], [(0, 1, 2)]), "triangles is inf"),
    ],
)
def test_what_is_wrong_is_one_error_with_file_and_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError, match=message) as raised:
        read_off(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.off cannot be read: No such file"):
        read_off(tmp_path / "none.off")
