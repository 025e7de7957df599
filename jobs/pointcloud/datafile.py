"""HDF5 files of point clouds: their layout, and writing them on all ranks.

A file has the group ``train`` and, if there are test clouds, ``test``::

    points  (N, P, 3) float32
    label   (N) int64          class of the cloud
    part    (N, P) uint8       part of each point, if parts are known

Each cloud is a chunk with a checksum. Attributes of the file: ``class_names``; ``part_names`` if there are parts; and
``made_from``, which identifies the content, so that an existing file need not be written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import h5py
import numpy as np
from mpi4py import MPI

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks, try_on_rank_0
from distconv.data.opened_file import open_hdf5
from distconv.errors import DataError
from distconv.whole_files import atomic_path

from .clouds import Cloud, Clouds

ROUND = 8
"""Clouds that each rank generates before rank 0 writes all of them."""

T = TypeVar("T")


def made_from(path: Path) -> str | None:
    """Return the attribute ``made_from`` of a file. Local.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    str, optional
        Empty if the file has no such attribute or is not HDF5. None if there is no file.
    """
    if not path.exists():
        return None
    try:
        with open_hdf5(path)[0] as file:
            return str(file.attrs.get("made_from", ""))
    except OSError:
        return ""


def write_clouds(
    path: Path, groups: Mapping[str, Clouds], comm: MPI.Intracomm, *, source: str, replace: bool = False
) -> bool:
    """Write clouds to a file. Collective: call on every rank.

    All ranks generate clouds and rank 0 writes them. The content does not depend on the number of ranks. The file
    appears under its name only when it is complete.

    Parameters
    ----------
    path : Path
        The file.
    groups : mapping of str to Clouds
        The clouds of each group.
    comm : MPI.Intracomm
        The ranks.
    source : str
        Identifies the content; stored as ``made_from``.
    replace : bool
        If True, replace a file with other content. Otherwise such a file is an error.

    Returns
    -------
    bool
        False if the file with this content exists already.

    Raises
    ------
    DataError
        On all ranks, if a file with other content exists, a cloud cannot be generated, or the file cannot be written.
        No incomplete file remains.
    MismatchError
        If the ranks pass different paths or sources.
    """
    check_same_on_all_ranks(comm, "point clouds to write", f"{path} from {source}")
    there = try_on_rank_0(comm, lambda: made_from(path), DataError)
    if there == source:
        return False
    if there is not None and not replace:
        raise DataError(
            f"{path}: made from {there or 'other data'}, not from {source}. Remove it or choose another name."
        )
    try:
        with ExitStack() as unfinished:
            file = try_on_all_ranks(
                comm, lambda: _create_file(path, unfinished, groups, source) if comm.rank == 0 else None, DataError
            )
            for name, clouds in groups.items():
                _fill(file, name, clouds, comm)
            try_on_all_ranks(comm, lambda: _finish(path, unfinished), DataError)
    except DataError:
        comm.Barrier()  # all ranks raise; none may continue before rank 0 has removed the file
        raise
    return True


def _create_file(path: Path, unfinished: ExitStack, groups: Mapping[str, Clouds], source: str) -> h5py.File:
    """Create the file under a temporary name; closing ``unfinished`` renames it to ``path``."""
    with _name_file_in_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = unfinished.enter_context(h5py.File(unfinished.enter_context(atomic_path(path)), "x"))
    file.attrs["made_from"] = source
    for name, clouds in groups.items():
        count, points = len(clouds.labels), clouds.points
        file.attrs["class_names"] = list(clouds.class_names)
        chunk: dict[str, object] = {"fletcher32": True}
        file.create_dataset(f"{name}/points", (count, points, 3), "f4", chunks=(1, points, 3), **chunk)
        file.create_dataset(f"{name}/label", data=np.asarray(clouds.labels, np.int64))
        if clouds.part_names:
            file.attrs["part_names"] = list(clouds.part_names)
            file.create_dataset(f"{name}/part", (count, points), "u1", chunks=(1, points), **chunk)
    return file


def _fill(file: h5py.File | None, name: str, clouds: Clouds, comm: MPI.Intracomm) -> None:
    """Generate the clouds of a group in rounds, and write them on rank 0. Collective."""
    count = len(clouds.labels)
    for start in range(0, count, ROUND * comm.size):
        mine = range(start + comm.rank, min(count, start + ROUND * comm.size), comm.size)
        own = try_on_all_ranks(comm, lambda mine=mine: {index: clouds[index] for index in mine}, DataError)  # type: ignore[misc]
        gathered = comm.gather(own)
        try_on_all_ranks(comm, lambda gathered=gathered: _put(file, name, gathered or []), DataError)  # type: ignore[misc]


def _put(file: h5py.File | None, name: str, gathered: list[dict[int, Cloud]]) -> None:
    if file is None:
        return
    with _name_file_in_errors(file.filename):
        for share in gathered:
            for index, cloud in share.items():
                file[f"{name}/points"][index] = cloud.points
                if cloud.part is not None:
                    file[f"{name}/part"][index] = cloud.part


def _finish(path: Path, unfinished: ExitStack) -> None:
    with _name_file_in_errors(path):
        unfinished.close()


@contextmanager
def _name_file_in_errors(path: str | Path) -> Iterator[None]:
    """Convert errors of HDF5, which do not contain the path, to a DataError that does."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} cannot be written: {error}") from error
