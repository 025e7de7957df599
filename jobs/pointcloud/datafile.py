"""HDF5 files of point clouds: their layout, and their writing on all ranks together.

A file has the groups ``train`` and, where there are any, ``test``::

    points  (N, P, 3) float32
    label   (N) int64          the class of the cloud
    part    (N, P) uint8       the part of each point, where parts are known

A cloud is a chunk, with a checksum. Attributes of the file: ``class_names``; ``part_names`` where there are parts;
``made_from``, which tells whether a file is the one that would be made.
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
"""Clouds that each rank makes before all are written."""

T = TypeVar("T")


def made_from(path: Path) -> str | None:
    """What the file says it was made from; None if there is no file, nothing if it is another's. Local."""
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
    """Write clouds to a file that appears whole or not at all. Collective: ranks share the making, rank 0 writes.

    The content does not depend on the number of ranks. ``source`` is what ``made_from`` will say. False if such a file
    is there already; one with other content is only replaced if ``replace`` says so.

    Raises
    ------
    DataError
        On all ranks, if something else is there, a cloud cannot be made, or the file cannot be written; nothing is left
        behind.
    MismatchError
        If ranks are to write different files.
    """
    check_same_on_all_ranks(comm, "point clouds to write", f"{path} from {source}")
    there = try_on_rank_0(comm, lambda: made_from(path), DataError)
    if there == source:
        return False
    if there is not None and not replace:
        raise DataError(
            f"{path} exists and was made from {there or 'something else'}, not from {source}; remove it or choose "
            f"another name"
        )
    try:
        with ExitStack() as unfinished:
            file = try_on_all_ranks(
                comm, lambda: _created(path, unfinished, groups, source) if comm.rank == 0 else None, DataError
            )
            for name, clouds in groups.items():
                _fill(file, name, clouds, comm)
            try_on_all_ranks(comm, lambda: _finish(path, unfinished), DataError)
    except DataError:
        comm.Barrier()  # it was raised on all ranks: none goes on before the file is gone
        raise
    return True


def _created(path: Path, unfinished: ExitStack, groups: Mapping[str, Clouds], source: str) -> h5py.File:
    """The file under a name that nobody has, until ``unfinished`` is closed: then it becomes ``path``."""
    with _named(path):
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
    """Make the clouds of a group, round by round, and write them where the file is."""
    count = len(clouds.labels)
    for start in range(0, count, ROUND * comm.size):
        mine = range(start + comm.rank, min(count, start + ROUND * comm.size), comm.size)
        own = try_on_all_ranks(comm, lambda mine=mine: {index: clouds[index] for index in mine}, DataError)  # type: ignore[misc]
        gathered = comm.gather(own)
        try_on_all_ranks(comm, lambda gathered=gathered: _put(file, name, gathered or []), DataError)  # type: ignore[misc]


def _put(file: h5py.File | None, name: str, gathered: list[dict[int, Cloud]]) -> None:
    if file is None:
        return
    with _named(file.filename):
        for share in gathered:
            for index, cloud in share.items():
                file[f"{name}/points"][index] = cloud.points
                if cloud.part is not None:
                    file[f"{name}/part"][index] = cloud.part


def _finish(path: Path, unfinished: ExitStack) -> None:
    with _named(path):
        unfinished.close()


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """What HDF5 says of a disk names no file."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} cannot be written: {error}") from error
