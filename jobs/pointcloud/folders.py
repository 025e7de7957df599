"""A folder of OFF meshes laid out as ModelNet: class/train/*.off, class/test/*.off.

Reading a mesh takes much longer than reading its points. So they are sampled when the folder is first opened, and kept
in a file in it.
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
    """Points on meshes, sampled whenever they are asked for; the place of a mesh in the list is its seed."""

    part_names = ()

    def __init__(self, files: list[tuple[Path, int]], class_names: tuple[str, ...], points: int) -> None:
        """``files`` with the class of each."""
        self.class_names, self.points = class_names, points
        self.paths = [path for path, _ in files]
        self.labels = np.array([label for _, label in files], np.int64)

    def __getitem__(self, index: int) -> Cloud:
        """The points of mesh ``index``."""
        points = surface_points(read_off(self.paths[index]), self.points, 0, index)
        return Cloud(points, int(self.labels[index]))


def find_meshes(folder: Path, points: int) -> dict[str, Meshes]:
    """The meshes for ``train`` and, where there are any, for ``test``, by class and name. Local.

    Raises
    ------
    DataError
        If there are none to train on.
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
        raise DataError(f"{folder} has no meshes to train on; lay them out as CLASS/train/*.off and CLASS/test/*.off")
    return meshes


def convert(
    folder: Path, path: Path, comm: MPI.Intracomm, points: int = CACHED_POINTS, *, replace: bool = False
) -> bool:
    """Sample the meshes of a folder into the file ``path``; False if it is there already. Collective."""
    groups = try_on_rank_0(comm, lambda: find_meshes(folder, points), DataError)
    source = try_on_rank_0(comm, lambda: _digest(folder, groups), DataError)
    return write_clouds(path, groups, comm, source=source, replace=replace)


def cached(folder: Path, comm: MPI.Intracomm, points: int = CACHED_POINTS) -> Path:
    """The file of the folder's points, made now if it is not there or a mesh has changed since. Collective.

    Raises
    ------
    DataError
        On all ranks, if a mesh is wrong, or the folder has no file and takes none.
    """
    path = folder / f"{points}_points.h5"
    try:
        convert(folder, path, comm, points, replace=True)
    except DataError as error:
        raise DataError(
            f"{error}. If {folder} cannot be written to: distconv data pointcloud --off {folder} --out PATH"
        ) from error
    return path


def _digest(folder: Path, groups: dict[str, Meshes]) -> str:
    """What a file of these meshes is made from: their names, sizes and times, and how many points."""
    digest = hashlib.blake2b(digest_size=8)
    for meshes in groups.values():
        for path in meshes.paths:
            status = path.stat()
            digest.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    counts = ", ".join(f"{len(meshes.labels)} {name}" for name, meshes in groups.items())
    return f"OFF meshes ({counts}), {groups['train'].points} points each, digest {digest.hexdigest()}"
