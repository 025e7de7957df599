"""Triangle meshes from OFF files.

Format:

- the header ``OFF``;
- the numbers of vertices, faces and edges, on the same line or the next. In ModelNet they may follow the header without
  a space (``OFF123 45 6``);
- a line ``x y z`` for each vertex;
- a line ``n i1 ... in`` for each face. A color may follow; it is ignored.

Comments (``#``) and blank lines are allowed anywhere. An invalid file raises a DataError with the path, the line, the
values and a suggested fix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from distconv.errors import DataError
from distconv.text_files import shorten

Number = TypeVar("Number", np.float64, np.int64)

FIX = "repair the mesh, or leave the file out"


@dataclass(frozen=True, eq=False)
class TriangleMesh:
    """Vertices float64 (V, 3) and triangles int64 (T, 3), which are indices of vertices."""

    vertices: NDArray[np.float64]
    triangles: NDArray[np.int64]

    @cached_property
    def areas(self) -> NDArray[np.float64]:
        """Area of each triangle (T)."""
        a, b, c = (self.vertices[corner] for corner in self.triangles.T)
        return np.asarray(np.linalg.norm(np.cross(b - a, c - a), axis=1) / 2)


class _OffLine(NamedTuple):
    """A line that is not blank: its number, counted from 1, and its words."""

    number: int
    words: list[str]


def read_off(path: Path) -> TriangleMesh:
    """Read a mesh from an OFF file.

    A face of more than three vertices becomes a fan of triangles around its first vertex. The fan covers a convex face
    exactly once, but triangles of a face that is not convex may overlap or lie outside it.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    TriangleMesh
        The mesh.

    Raises
    ------
    DataError
        If the file cannot be read, is truncated or too long, a value is invalid, or the surface has no area.
    """
    (vertex_count, face_count), lines = _counts(path, _lines(path))
    if vertex_count + face_count != len(lines):
        what = "truncated" if len(lines) < vertex_count + face_count else "longer than that"
        raise DataError(
            f"{path}: the header announces {vertex_count} vertices and {face_count} faces, but {len(lines)} "
            f"lines follow: the file is {what}. Download it again."
        )
    vertices = _vertices(path, lines[:vertex_count])
    mesh = TriangleMesh(vertices, _triangles(path, lines[vertex_count:], vertex_count))
    check_area(path, mesh)
    return mesh


def check_area(path: Path, mesh: TriangleMesh) -> None:
    """Check that points can be sampled on a mesh.

    Parameters
    ----------
    path : Path
        The file, for the message.
    mesh : TriangleMesh
        The mesh.

    Raises
    ------
    DataError
        If the surface has no area, or its area is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        area = mesh.areas.sum()
    if not 0 < area < np.inf:
        raise DataError(
            f"{path}: the total area of {len(mesh.triangles)} triangles is {area:g}, so no point can be sampled; {FIX}"
        )


def fan_triangles(corners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the triangles of faces, as fans around their first vertices.

    Parameters
    ----------
    corners : ndarray of int64, shape (F, n)
        Indices of the vertices of faces with n corners.

    Returns
    -------
    ndarray of int64, shape (F (n - 2), 3)
        The triangles.
    """
    fans = [corners[:, [0, second, second + 1]] for second in range(1, corners.shape[1] - 1)]
    return np.concatenate([np.empty((0, 3), np.int64), *fans])


def _lines(path: Path) -> list[_OffLine]:
    """Return the lines that are not blank, without comments."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not text. Use an OFF file in text format.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    split = (_OffLine(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1))
    return [line for line in split if line.words]


def _counts(path: Path, lines: list[_OffLine]) -> tuple[tuple[int, int], list[_OffLine]]:
    """Return the numbers of vertices and faces, and the lines after the header."""
    if not lines:
        raise DataError(f"{path}: the file is empty. Download it again.")
    number, (header, *counts) = lines[0]
    if not re.fullmatch(r"OFF(-?\d\S*)?", header):
        raise DataError(f"{path}, line {number}: starts with {shorten(header)!r}, not with 'OFF'. Use an OFF file.")
    counts = [header[3:], *counts] if header != "OFF" else counts
    rest = lines[1:]
    if not counts and rest:
        (number, counts), rest = rest[0], rest[1:]
    if len(counts) != 3 or not all(re.fullmatch(r"\d{1,18}", count) for count in counts):
        raise DataError(
            f"{path}, line {number}: {shorten(' '.join(counts))!r} are not the numbers of vertices, faces and "
            "edges. Download it again."
        )
    return (int(counts[0]), int(counts[1])), rest


def _vertices(path: Path, lines: list[_OffLine]) -> NDArray[np.float64]:
    for number, words in lines:
        if len(words) != 3:
            raise DataError(f"{path}, line {number}: a vertex needs 3 coordinates, found {len(words)}; {FIX}")
    vertices = _numbers(path, lines, [words for _, words in lines], np.float64).reshape(-1, 3)
    wrong = ~np.isfinite(vertices).all(1)
    if wrong.any():
        vertex = int(wrong.argmax())
        raise DataError(
            f"{path}, line {lines[vertex].number}: vertex {vertex} is not finite ({vertices[vertex]}); {FIX}"
        )
    return vertices


def _triangles(path: Path, lines: list[_OffLine], vertex_count: int) -> NDArray[np.int64]:
    """Return the triangles of all faces, grouped by the number of corners of the face."""
    by_sides: dict[str, list[_OffLine]] = {}
    for line in lines:
        by_sides.setdefault(line.words[0], []).append(line)
    fans = [fan_triangles(_corners(path, sides, faces, vertex_count)) for sides, faces in by_sides.items()]
    return np.concatenate([np.empty((0, 3), np.int64), *fans])


def _corners(path: Path, sides: str, lines: list[_OffLine], vertex_count: int) -> NDArray[np.int64]:
    """Return the vertex indices of faces that all have ``sides`` corners."""
    if not re.fullmatch(r"\d{1,9}", sides) or int(sides) < 3:
        raise DataError(
            f"{path}, line {lines[0].number}: a face needs at least 3 vertices, found {shorten(sides)!r}; {FIX}"
        )
    count = int(sides)
    for number, words in lines:
        if len(words) < 1 + count:
            raise DataError(
                f"{path}, line {number}: the face announces {count} vertices but has {len(words) - 1}: truncated "
                "or damaged. Download it again."
            )
    corners = _numbers(path, lines, [words[1 : 1 + count] for _, words in lines], np.int64)
    wrong = (corners < 0) | (corners >= vertex_count)
    if wrong.any():
        face, corner = np.argwhere(wrong)[0]
        raise DataError(
            f"{path}, line {lines[face].number}: the face refers to vertex {corners[face, corner]}, but there "
            f"are {vertex_count}, counted from 0; {FIX}"
        )
    return corners


def _numbers(path: Path, lines: list[_OffLine], words: Sequence[list[str]], dtype: type[Number]) -> NDArray[Number]:
    """Return words as numbers (lines, words of a line)."""
    try:
        return np.array(words, dtype)
    except (ValueError, OverflowError):
        # All words are converted at once, which is fast. Only after an error each of them is tried.
        for (number, _), row in zip(lines, words, strict=True):
            for word in row:
                _check_number(word, dtype, f"{path}, line {number}")
        raise


def _check_number(word: str, dtype: type[Number], where: str) -> None:
    try:
        np.array([word], dtype)
    except (ValueError, OverflowError) as error:
        kind = "number" if dtype is np.float64 else "index of a vertex"
        raise DataError(f"{where}: {shorten(word)!r} is not a valid {kind}; {FIX}") from error
