"""A folder of OFF meshes laid out as ModelNet: class/train/*.off, class/test/*.off.

Reading a mesh takes much longer than reading sampled points. The meshes are therefore sampled once, when the folder is
first opened, and the points are stored in a file in the folder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from mpi4py import MPI

from distconv.communication.agreement import try_on_rank_0
from distconv.errors import DataError

from .clouds import Cloud
from .datafile import write_clouds
from .off import read_off
from .sampling import CACHED_POINTS, surface_points

GROUPS = ("train", "test")


class Meshes:
    """Points on meshes, sampled at each access. The index of a mesh in the list is its seed.

    Parameters
    ----------
    files : list of (Path, int)
        The meshes with their class.
    class_names : tuple of str
        Names of the classes.
    points : int
        Number of points on each mesh.
    """

    part_names = ()

    def __init__(self, files: list[tuple[Path, int]], class_names: tuple[str, ...], points: int) -> None:
        """Store the list of meshes; nothing is read."""
        self.class_names, self.points = class_names, points
        self.paths = [path for path, _ in files]
        self.labels = np.array([label for _, label in files], np.int64)

    def __getitem__(self, index: int) -> Cloud:
        """Return the points of mesh ``index``."""
        points = surface_points(read_off(self.paths[index]), self.points, 0, index)
        return Cloud(points, int(self.labels[index]))


def find_meshes(folder: Path, points: int) -> dict[str, Meshes]:
    """Find the meshes of a folder, sorted by class and name. Local.

    Parameters
    ----------
    folder : Path
        The folder.
    points : int
        Number of points on each mesh.

    Returns
    -------
    dict of str to Meshes
        ``train`` and, if there are any, ``test``.

    Raises
    ------
    DataError
        If there are no training meshes.
    """
    class_names = tuple(sorted(each.name for each in folder.iterdir() if (each / "train").is_dir()))
    meshes = {}
    for group in GROUPS:
        files = [
            (path, label)
            for label, name in enumerate(class_names)
            for path in sorted((folder / name / group).glob("*"))
            if path.suffix.lower() == ".off"
        ]
        if files:
            meshes[group] = Meshes(files, class_names, points)
    if "train" not in meshes:
        raise DataError(f"{folder}: no training meshes found. Store meshes as CLASS/train/*.off and CLASS/test/*.off.")
    return meshes


def convert(
    folder: Path, path: Path, comm: MPI.Intracomm, points: int = CACHED_POINTS, *, replace: bool = False
) -> bool:
    """Sample the meshes of a folder and write the points to a file. Collective: call on every rank.

    Parameters
    ----------
    folder : Path
        The folder.
    path : Path
        The file to write.
    comm : MPI.Intracomm
        The ranks, which sample the meshes in parallel.
    points : int
        Number of points on each mesh.
    replace : bool
        If True, replace a file with other content. Otherwise such a file is an error.

    Returns
    -------
    bool
        False if the file with this content exists already.

    Raises
    ------
    DataError, MismatchError
        As in :func:`distconv.jobs.pointcloud.datafile.write_clouds`.
    """
    groups = try_on_rank_0(comm, lambda: find_meshes(folder, points), DataError)
    source = try_on_rank_0(comm, lambda: _digest(folder, groups), DataError)
    return write_clouds(path, groups, comm, source=source, replace=replace)


def cached_file(folder: Path, comm: MPI.Intracomm, points: int = CACHED_POINTS) -> Path:
    """Return the file of the folder's points; write it if it is missing or a mesh has changed. Collective.

    Parameters
    ----------
    folder, comm, points
        As in :func:`convert`.

    Returns
    -------
    Path
        The file, in ``folder``.

    Raises
    ------
    DataError
        On all ranks, if a mesh is invalid, or the folder has no such file and is not writable.
    """
    path = folder / f"{points}_points.h5"
    try:
        convert(folder, path, comm, points, replace=True)
    except DataError as error:
        raise DataError(
            f"{error}. If {folder} is not writable, run distconv data pointcloud --off {folder} --out PATH."
        ) from error
    return path


def _digest(folder: Path, groups: dict[str, Meshes]) -> str:
    """Return a description of the meshes and the number of points, with a digest of file names, sizes and times."""
    digest = hashlib.blake2b(digest_size=8)
    for meshes in groups.values():
        for path in meshes.paths:
            status = path.stat()
            digest.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    counts = ", ".join(f"{len(meshes.labels)} {name}" for name, meshes in groups.items())
    return f"OFF meshes ({counts}), {groups['train'].points} points each, digest {digest.hexdigest()}"
