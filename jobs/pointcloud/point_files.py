"""Point clouds and meshes from PLY, NPY and NPZ files.

- PLY: the element ``vertex`` with the properties ``x``, ``y`` and ``z``. With faces (``vertex_indices`` or
  ``vertex_index``) the file is a mesh, otherwise a cloud. The package ``plyfile`` reads it.
- NPY: an array (P, 3 or more), of which the first three columns are coordinates.
- NPZ: such an array under the name ``points`` or ``pos``, or the only one of the file.

An invalid file raises a DataError with the path, the values and a suggested fix.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.errors import DataError

from .off import FIX, TriangleMesh, check_area, fan_triangles, read_off

_NAMES = ("points", "pos")
"""Names of the points in NPZ files."""


def read_ply(path: Path) -> TriangleMesh | NDArray[np.float64]:
    """Read a PLY file.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    TriangleMesh or ndarray of float64, shape (P, 3)
        A mesh if the file has faces. Otherwise its points.

    Raises
    ------
    DataError
        If the file cannot be read, a value is invalid, or the package ``plyfile`` is missing.
    """
    try:
        import plyfile
    except ImportError as error:
        raise DataError(f"{path}: plyfile is not installed. Run pip install 'distconv[pointcloud]'.") from error
    try:
        elements: Any = plyfile.PlyData.read(str(path), mmap=False)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (plyfile.PlyParseError, ValueError, TypeError, MemoryError, OverflowError) as error:
        raise DataError(f"{path}: damaged PLY file ({error}). Download it again.") from error
    properties = elements["vertex"].data.dtype.names if "vertex" in elements else ()
    if not {"x", "y", "z"} <= set(properties):
        raise DataError(f"{path}: no element 'vertex' with properties x, y and z. Add them.")
    try:
        vertices = np.stack([np.asarray(elements["vertex"][axis], np.float64) for axis in "xyz"], 1)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path}: x, y and z of 'vertex' are not numbers ({error}). Write one number for each."
        ) from error
    points = _checked(path, vertices)
    if "face" not in elements or not len(elements["face"].data):
        return points
    mesh = TriangleMesh(points, _face_triangles(path, elements["face"].data, len(points)))
    check_area(path, mesh)
    return mesh


def read_array(path: Path) -> NDArray[np.float64]:
    """Read the points of an NPY or NPZ file.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    ndarray of float64, shape (P, 3)
        The points.

    Raises
    ------
    DataError
        If the file cannot be read, or has no such array.
    """
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            arrays = {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, MemoryError, NotImplementedError, SyntaxError) as error:
        raise DataError(f"{path}: damaged file of NumPy arrays ({error}). Write it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    named = [arrays[name] for name in _NAMES if name in arrays] or list(arrays.values())
    if len(named) != 1:
        raise DataError(f"{path}: arrays {sorted(arrays)}. Name the points {_NAMES[0]!r}.")
    points = named[0]
    if points.ndim != 2 or points.shape[1] < 3 or points.dtype.kind not in "fiu":
        raise DataError(
            f"{path}: an array {points.dtype} {points.shape} is not a list of points. Write numbers (P, 3)."
        )
    return _checked(path, points[:, :3].astype(np.float64))


READERS: dict[str, Callable[[Path], TriangleMesh | NDArray[np.float64]]] = {
    ".off": read_off,
    ".ply": read_ply,
    ".npy": read_array,
    ".npz": read_array,
}
"""Reader of each kind of file, by its suffix."""


def _checked(path: Path, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return points that exist and are finite."""
    wrong = ~np.isfinite(points).all(1)
    if not len(points) or wrong.any():
        what = f"point {wrong.argmax()} of {len(points)} is not finite" if len(points) else "there are no points"
        raise DataError(f"{path}: {what}; {FIX}")
    return points


def _face_triangles(path: Path, faces: Any, vertices: int) -> NDArray[np.int64]:
    """Return the triangles of all faces, grouped by the number of corners of the face."""
    name = next((each for each in ("vertex_indices", "vertex_index") if each in faces.dtype.names), None)
    if name is None:
        raise DataError(f"{path}: faces have no property 'vertex_indices'. Add it, or leave the faces out.")
    by_sides: dict[int, list[NDArray[np.int64]]] = {}
    for face in faces[name]:
        corners = np.atleast_1d(np.asarray(face)).astype(np.int64)
        by_sides.setdefault(len(corners), []).append(corners)
    if min(by_sides) < 3:
        raise DataError(f"{path}: a face has {min(by_sides)} vertices, and at least 3 are required; {FIX}")
    triangles = np.concatenate([fan_triangles(np.stack(corners)) for corners in by_sides.values()])
    wrong = triangles[(triangles < 0) | (triangles >= vertices)]
    if len(wrong):
        raise DataError(f"{path}: a face refers to vertex {wrong[0]}, but there are {vertices}, counted from 0; {FIX}")
    return triangles
