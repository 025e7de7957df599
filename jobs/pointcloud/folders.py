"""A folder of meshes and point files laid out as ModelNet: class/train/*, class/test/*.

Reading a mesh takes much longer than reading sampled points. All files are therefore sampled once, when the folder is
first opened, and the points are stored in a file in the folder. :mod:`.point_files` lists the kinds of files.
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
from .off import TriangleMesh
from .point_files import READERS
from .sampling import CACHED_POINTS, chosen_points, surface_points

GROUPS = ("train", "test")


class FolderClouds:
    """Points of files, sampled at each access. The index of a file in the list is its seed.

    Parameters
    ----------
    files : list of (Path, int)
        The files with their class.
    class_names : tuple of str
        Names of the classes.
    points : int
        Number of points of each file: uniform on meshes, and a choice of the points of clouds.
    """

    part_names = ()

    def __init__(self, files: list[tuple[Path, int]], class_names: tuple[str, ...], points: int) -> None:
        """Store the list of files; nothing is read."""
        self.class_names, self.points = class_names, points
        self.paths = [path for path, _ in files]
        self.labels = np.array([label for _, label in files], np.int64)

    def __getitem__(self, index: int) -> Cloud:
        """Return the points of file ``index``."""
        path = self.paths[index]
        found = READERS[path.suffix.lower()](path)
        if isinstance(found, TriangleMesh):
            points = surface_points(found, self.points, 0, index)
        else:
            points = chosen_points(found, self.points, 0, index)
        return Cloud(points, int(self.labels[index]))


def find_clouds(folder: Path, points: int) -> dict[str, FolderClouds]:
    """Find the meshes and point files of a folder, sorted by class and name. Local.

    Parameters
    ----------
    folder : Path
        The folder.
    points : int
        Number of points of each file.

    Returns
    -------
    dict of str to FolderClouds
        ``train`` and, if there are any, ``test``.

    Raises
    ------
    DataError
        If there are no training files.
    """
    class_names = tuple(sorted(each.name for each in folder.iterdir() if (each / "train").is_dir()))
    clouds = {}
    for group in GROUPS:
        files = [
            (path, label)
            for label, name in enumerate(class_names)
            for path in sorted((folder / name / group).glob("*"))
            if path.suffix.lower() in READERS
        ]
        if files:
            clouds[group] = FolderClouds(files, class_names, points)
    if "train" not in clouds:
        raise DataError(
            f"{folder}: no training clouds found. Store files as CLASS/train/* and CLASS/test/* ({' '.join(READERS)})."
        )
    return clouds


def convert(
    folder: Path, path: Path, comm: MPI.Intracomm, points: int = CACHED_POINTS, *, replace: bool = False
) -> bool:
    """Sample the files of a folder and write the points to a file. Collective: call on every rank.

    Parameters
    ----------
    folder : Path
        The folder.
    path : Path
        The file to write.
    comm : MPI.Intracomm
        The ranks, which sample the files in parallel.
    points : int
        Number of points of each cloud.
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
    groups = try_on_rank_0(comm, lambda: find_clouds(folder, points), DataError)
    source = try_on_rank_0(comm, lambda: _digest(folder, groups), DataError)
    return write_clouds(path, groups, comm, source=source, replace=replace)


def cached_file(folder: Path, comm: MPI.Intracomm, points: int = CACHED_POINTS) -> Path:
    """Return the file of the folder's points; write it if it is missing or a file has changed. Collective.

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
        On all ranks, if a file is invalid, or the folder has no such file and is not writable.
    """
    path = folder / f"{points}_points.h5"
    try:
        convert(folder, path, comm, points, replace=True)
    except DataError as error:
        raise DataError(
            f"{error}. If {folder} is not writable, run distconv data pointcloud --off {folder} --out PATH."
        ) from error
    return path


def _digest(folder: Path, groups: dict[str, FolderClouds]) -> str:
    """Return a description of the files and the number of points, with a digest of file names, sizes and times."""
    digest = hashlib.blake2b(digest_size=8)
    kinds = set[str]()
    for clouds in groups.values():
        for path in clouds.paths:
            kinds.add(path.suffix[1:].upper())
            status = path.stat()
            digest.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    counts = ", ".join(f"{len(clouds.labels)} {name}" for name, clouds in groups.items())
    # Files that were made from OFF meshes alone keep their description, so they are not made again.
    files = "OFF meshes" if kinds == {"OFF"} else f"{', '.join(sorted(kinds))} files"
    return f"{files} ({counts}), {groups['train'].points} points each, digest {digest.hexdigest()}"
